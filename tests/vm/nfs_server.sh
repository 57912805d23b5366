#!/bin/busybox sh
# nfs_server start|stop: the kernel's NFSv4 server of the guest, which exports /export and nothing else.
set -e
nfsd=/proc/fs/nfsd
if [ "$1" = stop ]; then
  echo 0 >$nfsd/threads
  exit
fi
# After a start clients may claim what they had open, and all others are kept waiting, for so long: the least that the
# kernel takes.
echo 10 >$nfsd/nfsv4leasetime
echo 10 >$nfsd/nfsv4gracetime
echo '-3 +4 +4.1 +4.2' >$nfsd/versions
echo 'tcp 2049' >$nfsd/portlist
echo 3 >$nfsd/threads
# What rpc.mountd would answer the kernel: who the client is, what it may mount, and which file system that is.
never=2147483647
flags=9216  # NFSEXP_FSID: it goes by a number, 0, that of the root; NFSEXP_NOSUBTREECHECK
echo "nfsd 127.0.0.1 $never guest" >/proc/net/rpc/auth.unix.ip/channel
echo "guest /export $never $flags 65534 65534 0" >/proc/net/rpc/nfsd.export/channel
echo "guest 1 \\x00000000 $never /export" >/proc/net/rpc/nfsd.fh/channel
