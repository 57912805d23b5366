# Sourced by /init: the rows of the table.
for folder in /ext4 /xfs; do load_file make $folder/file; done
make_export

# What is found out about each storage, with what its kernel can.
release=$(uname -r)
minor=${release#*.}
kernel=$((${release%%.*} * 100 + ${minor%%.*}))
residency=mincore
if [ $kernel -ge 605 ]; then residency=cachestat; fi
expect_probe() { row 'what is found out' "$1" - sh -c "load_file probe /$1/file | tee /tmp/found; grep -qxF '$2' /tmp/found"; }
if [ $kernel -lt 614 ]; then
  expect_probe ext4 "direct, memory 4, offset 512, residency by $residency, no RWF_DONTCACHE"
  expect_probe xfs "direct, memory 4, offset 512, residency by $residency, no RWF_DONTCACHE"
  expect_probe nfs "direct, memory 512, offset 512, residency by $residency, no RWF_DONTCACHE"
fi

for folder in /ext4 /xfs /nfs; do
  for reader in $READERS; do
    case $reader in
      io_uring/*) registered=yes ;;
      *) registered=no ;;
    esac
    load 'cold' $folder $reader registered=$registered
  done
  for reader in io_uring pread; do
    load 'cold, as auto decides' $folder $reader/auto
    load 'cached, as auto decides' $folder $reader/auto cached=yes
    load 'the page cache is left alone' $folder $reader/buffered page_cache=leave
  done
done

# What benchmarks measure with.
for folder in /ext4 /xfs /nfs; do
  for reader in $READERS reference/direct reference/buffered; do
    row 'measured' ${folder#/} "$reader" load_file measure $folder/file "reader=${reader%/*}" "strategy=${reader#*/}"
  done
done

# The native tests whose outcome is up to the storage.
for folder in /ext4 /xfs /nfs; do
  row 'native tests of the readers' ${folder#/} - env TMPDIR=$folder test_readers
  if [ $folder = /xfs ]; then continue; fi  # which is no other than ext4 to the pipeline
  row 'native tests of the pipeline' ${folder#/} - env TMPDIR=$folder test_pipeline \
    '--test-case=*every reader and strategy*,*counts what the pipeline reads*,*read into in place*,*truncated under*'
done

# Somebody without privileges, who may pin 64 KiB and not see what is cached.
echo 'nobody:x:65534:65534:::/bin/sh' >/etc/passwd
for folder in /ext4 /nfs; do
  for reader in $READERS; do
    row 'unprivileged, 64 KiB pinned at most' ${folder#/} "$reader" su nobody -c "ulimit -l 64;
      exec load_file load $folder/file reader=${reader%/*} strategy=${reader#*/} registered=no"
  done
done

# A block that can't be read: the device-mapper fails the sectors that hold it.
mount /dev/nvme0n4 /faulty
load_file make /faulty/file
bad=$(($(load_file where /faulty/file) / 4096 * 8))
sectors=$(cat /sys/block/nvme0n4/size)
umount /faulty
dmsetup create --noudevsync faulty <<TABLE
0 $bad linear /dev/nvme0n4 0
$bad 8 error
$((bad + 8)) $((sectors - bad - 8)) linear /dev/nvme0n4 $((bad + 8))
TABLE
mount -o ro /dev/dm-0 /faulty
for reader in $READERS; do load 'a bad block' /faulty $reader expect=read:EIO; done

# The server's file changes while it is read. To open it waits for the client to give its delegation back; truncate(1)
# does not wait.
cut=': >>/export/file; truncate -s 9000000 /export/file'
for reader in $READERS; do
  load 'cut on the server' /nfs $reader "during=$cut" 'expect=end_of_file|changed'
  make_export
  load 'written to on the server' /nfs $reader 'during=echo >>/export/file' expect=changed
  make_export
done
mkdir /stale
mount_nfs /stale noatime,actimeo=600,nosharecache
for reader in $READERS; do
  load 'cut, attributes cached for long' /stale $reader "during=$cut" 'expect=end_of_file|changed'
  make_export
done
umount /stale

# The server, or the network, goes away.
for reader in $READERS; do
  load 'network gone for 4 s' /nfs $reader 'during=ip link set lo down; (sleep 4; ip link set lo up) >/dev/null 2>&1 &'
  load 'network gone beyond the time-out' /nfs $reader timeout_ms=3000 expect=timeout \
    'during=ip link set lo down' 'then=ip link set lo up'
  load 'server gone for 4 s' /nfs $reader 'during=nfs_server stop; (sleep 4; nfs_server start) >/dev/null 2>&1 &'
  load 'server gone for good' /nfs $reader timeout_ms=3000 expect=timeout 'during=nfs_server stop'
  nfs_server start
  case $reader in
    io_uring/direct | pread/buffered)  # of a file that is lost, the client makes EIO or EBADF, by the way it is read
      load 'file replaced, server restarted' /nfs $reader expect=changed \
        'during=nfs_server stop; rm /export/file; load_file make /export/file; nfs_server start'
      ;;
  esac
done
