#!/bin/busybox sh
# /init of the guest of `make test-storage`: file systems on an emulated NVMe disk, an NFS server and its client, and
# every reader on them. Standard output is the host's; the console is the kernel's.
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
exec >/dev/ttyS1 2>&1 </dev/null
cd /tmp

READERS='io_uring/direct io_uring/buffered pread/direct pread/buffered'
scenarios=0
wrong=0

# row SCENARIO STORAGE READER COMMAND...: runs it, prints a row of the table. The last line of its output says what was
# found; it is right when the command succeeds.
row() {
  local scenario=$1 storage=$2 reader=$3
  shift 3
  timeout -s KILL 240 "$@" >/tmp/output 2>&1
  status=$?
  scenarios=$((scenarios + 1))
  verdict=ok
  if [ $status != 0 ]; then
    verdict=WRONG
    wrong=$((wrong + 1))
  fi
  printf '| %-36s | %-8s | %-17s | %-5s | %s\n' "$scenario" "$storage" "$reader" $verdict "$(tail -n 1 /tmp/output)"
  if [ $status != 0 ]; then sed 's/^/    /' /tmp/output; fi
}

# load SCENARIO FOLDER READER/STRATEGY [option=value ...]
load() {
  local scenario=$1 folder=$2 reader=$3
  shift 3
  row "$scenario" "${folder#/}" "$reader" load_file load "$folder/file" "reader=${reader%/*}" "strategy=${reader#*/}" "$@"
}

printf '| %-36s | %-8s | %-17s | %-5s | %s\n' "scenario, Linux $(uname -r)" storage reader '' found
echo '|---|---|---|---|---|'
mkdir /ext4 /xfs /nfs /export /faulty
ip link set lo up
for module in xfs nfsd nfsv4 dm-mod; do modprobe $module; done
mount /dev/nvme0n1 /ext4
mount /dev/nvme0n2 /xfs
mount /dev/nvme0n3 /export
mount -t nfsd nfsd /proc/fs/nfsd
nfs_server start
mount_nfs() { mount -t nfs4 -o "vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1${2:+,$2}" 127.0.0.1:/ "$1"; }
mount_nfs /nfs
make_export() { load_file make /export/file; }

. /scenarios.sh

echo "$scenarios scenarios, $wrong wrong"
poweroff -f
