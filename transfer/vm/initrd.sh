#!/bin/sh
# initrd.sh TREE VERSION FILE: packs an initial file system for a kernel package that is unpacked in TREE. It loads the modules
# that the guest needs, lays a writable layer over the host's files and hands over to guest.sh.
set -eu
tree=$1 version=$2 file=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/modules" "$work/proc" "$work/sys" "$work/dev" "$work/host" "$work/top" "$work/root"
cp "$(command -v busybox)" "$work/bin/busybox"

depmod -b "$tree" "$version"
# crc32: what soft-RoCE asks the kernel's crypto for. 9p: the host's files. overlay: the writable layer. netem: loses packets.
for module in virtio_pci 9pnet_virtio 9p overlay dummy veth sch_netem crc32_generic crc32_pclmul ib_uverbs rdma_rxe; do
  modprobe -d "$tree" -S "$version" --show-depends "$module" 2>/dev/null | sed -n 's/^insmod \([^ ]*\).*/\1/p'
done | awk '!seen[$0]++' | while read -r path; do
  name=$(basename "$path")
  case $path in
    *.xz) xz -dc "$path" >"$work/modules/${name%.xz}" ;;
    *.zst) zstd -qdc "$path" >"$work/modules/${name%.zst}" ;;
    *) cp "$path" "$work/modules/" ;;
  esac
  echo "${name%.xz}" | sed 's/\.zst$//' >>"$work/modules/order"
done
grep -q '^rdma_rxe' "$work/modules/order" || { echo "the kernel $version has no rdma_rxe module"; exit 1; }

cat >"$work/init" <<'END'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc && $b mount -t sysfs sys /sys && $b mount -t devtmpfs dev /dev
# One that the processor has no use for is refused, and is not missed.
while read -r module; do $b insmod "/modules/$module" 2>/dev/null; done </modules/order
share=trans=virtio,version=9p2000.L,msize=1048576
$b mount -t 9p -o $share,cache=loose,ro host /host
$b mount -t tmpfs top /top && $b mkdir /top/upper /top/work
$b mount -t overlay -o lowerdir=/host,upperdir=/top/upper,workdir=/top/work root /root
for place in proc sys dev; do $b mount --move "/$place" "/root/$place"; done
$b mkdir -p /root/dev/shm /root/dev/pts
$b mount -t tmpfs shm /root/dev/shm && $b mount -t tmpfs run /root/run
$b mkdir -p /root/run/job && $b mount -t 9p -o $share job /root/run/job
exec $b switch_root /root /bin/sh /run/job/guest.sh
END
chmod +x "$work/init"
(cd "$work" && find . | cpio --quiet -o -H newc | zstd -q -3 -f -o "$file")
