#!/bin/sh
# The first process of the guest: four soft-RoCE NICs on dummy links, then the job. What the job prints goes to the second
# serial line, its exit status into a file of the shared folder.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
stty raw -echo </dev/ttyS1
exec >/dev/ttyS1 2>&1
ip link set lo up
for nic in 0 1 2 3; do
  ip link add "nic$nic" type dummy
  ip address add "10.77.$nic.1/24" dev "nic$nic"
  ip link set "nic$nic" mtu 9000 up
  rdma link add "rxe$nic" type rxe netdev "nic$nic"
done
# And two at the ends of a wire, which can be cut (tc qdisc). Both ends belong to this machine, so packets for it from itself
# must be sent out all the same, and taken where they come in.
ip link add wire0 type veth peer name wire1
for end in 0 1; do
  ip address add "10.78.0.1$end/24" dev "wire$end"
  echo 1 >"/proc/sys/net/ipv4/conf/wire$end/accept_local"
  echo 0 >"/proc/sys/net/ipv4/conf/wire$end/rp_filter"
  ip link set "wire$end" mtu 4200 up
  ip rule add pref 100 dev "wire$end" lookup local
  rdma link add "rxe1$end" type rxe netdev "wire$end"
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip route add 10.78.0.11 dev wire0 src 10.78.0.10 table 78
ip route add 10.78.0.10 dev wire1 src 10.78.0.11 table 78
ip rule add pref 101 to 10.78.0.0/24 lookup 78
ip rule add pref 102 lookup local
ip rule del pref 0
ulimit -l unlimited
sh /run/job/job.sh
echo $? >/run/job/status
sync
# The first process must not end before the machine is off.
echo o >/proc/sysrq-trigger
while :; do :; done
