#!/bin/sh
# run.sh JOB: runs the shell script JOB as root in a virtual machine that has verbs devices rxe0 to rxe3 (soft-RoCE). The guest
# sees the files of this machine, and what it writes to them is thrown away. Exit status: that of the job; 77 with a reason
# where no virtual machine can be had; 124 where the job took longer than VM_SECONDS (default 600). VM_CPU names the processor.
#
# The kernel is Debian's, taken from its package and not installed. KVM runs it where KVM has what it needs, else QEMU's own
# emulation of a processor does.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cache=${VM_CACHE:-$here/../target/vm}
PATH=$PATH:/usr/sbin:/sbin
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)

skip() {
  echo "verbs: skipped, $*"
  exit 77
}

job=$(realpath "$1")
test "$(uname -m)" = x86_64 || skip "the virtual machine is for x86-64, this is $(uname -m)"
command -v apt-get >/dev/null || skip "the kernel comes as a Debian package, and there is no apt-get"

tools() {
  for tool in qemu-system-x86_64 busybox modprobe cpio zstd xz rdma ip; do
    command -v "$tool" >/dev/null || return 1
  done
  ldconfig -p | grep -q 'libibverbs\.so\.1' && test -e /etc/libibverbs.d/rxe.driver
}

install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends qemu-system-x86 busybox-static kmod cpio zstd \
    xz-utils libibverbs1 ibverbs-providers rdma-core iproute2
}

if ! tools; then
  test "$(id -u)" = 0 || skip "qemu-system-x86, busybox-static, kmod, cpio, zstd, rdma-core or ibverbs-providers is not installed"
  { install || { apt-get update -qq && install; }; } >"$cache/install.log" 2>&1 || skip "packages cannot be installed (see $cache/install.log)"
  tools || skip "a tool is missing after its package was installed (see $cache/install.log)"
fi

# The kernel that Debian's meta package stands for. One that is unpacked already will do.
if ! ls "$cache"/tree/boot/vmlinuz-* >/dev/null 2>&1; then
  rm -rf "$cache/tree" "$cache/download"
  mkdir -p "$cache/download"
  {
    for update in no yes; do
      test "$update" = no || apt-get update -qq
      package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: //p' | head -n 1)
      (cd "$cache/download" && apt-get download -qq "$package" && dpkg -x ./*.deb ../unpacked && mv ../unpacked ../tree) && break
    done
  } >"$cache/kernel.log" 2>&1 || true
  rm -rf "$cache/download" "$cache/unpacked"
fi
version=$(ls "$cache/tree/lib/modules" 2>/dev/null | head -n 1)
test -n "$version" || skip "no kernel package can be had (see $cache/kernel.log)"
initrd=$cache/initrd-$(cat "$here/initrd.sh" | cksum | cut -d ' ' -f 1).zst
test -e "$initrd" || "$here/initrd.sh" "$cache/tree" "$version" "$initrd" || skip "the kernel $version cannot be used"

# Some hosts offer a KVM that lacks what every x86-64 kernel needs; with `enforce` it says so at once.
accelerator="tcg,thread=multi,tb-size=512"
if test -w /dev/kvm && echo quit | timeout 10 qemu-system-x86_64 -accel kvm -cpu qemu64,enforce -S -nodefaults -display none \
  -monitor stdio >/dev/null 2>&1; then
  accelerator=kvm
fi

share=$(mktemp -d)
trap 'rm -rf "$share"' EXIT
cp "$here/guest.sh" "$share/"
cp "$job" "$share/job.sh"
status=0
timeout "${VM_SECONDS:-600}" qemu-system-x86_64 -accel "$accelerator" -cpu "${VM_CPU:-qemu64}" -smp 2 -m 2G -display none -no-reboot -nodefaults \
  -serial "file:$cache/console.log" -serial stdio -kernel "$cache/tree/boot/vmlinuz-$version" -initrd "$initrd" \
  -append "console=ttyS0 panic=-1 quiet" \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  -virtfs "local,path=$share,mount_tag=job,security_model=none" </dev/null || status=$?
test "$status" = 124 && exit 124
if ! test -e "$share/status"; then
  tail -n 20 "$cache/console.log"
  echo "verbs: the virtual machine ended early (status $status)"
  exit 1
fi
exit "$(cat "$share/status")"
