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
ulimit -l unlimited
sh /run/job/job.sh
echo $? >/run/job/status
sync
# The first process must not end before the machine is off.
echo o >/proc/sysrq-trigger
while :; do :; done
