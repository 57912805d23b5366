#!/usr/bin/env bash
# Boots a virtual machine with Debian's kernel, an emulated NVMe disk, and an NFS server with its client, and runs every
# reader there, through storage that fails as well. Prints a table; fails when one of its rows is wrong. Skips, and says
# why, where packages are missing, or when the guest takes too long.
#   scripts/storage_tests.sh
# Variables: VM_KERNEL (a Debian package; default linux-image-cloud-amd64, the kernel of this release), VM_SECONDS (that the
# guest may take; default 600).
#
# Installs what runs here (qemu, mkfs). The guest's kernel and busybox are downloaded into build/vm and unpacked there; the
# other programs of the guest are this machine's, and what `make test-native` builds. What the guest does: tests/vm.
set -euo pipefail
cd "$(dirname "$0")/.."
VM_KERNEL=${VM_KERNEL:-linux-image-cloud-amd64}
VM_SECONDS=${VM_SECONDS:-600}
DOWNLOAD_SECONDS=300
bin=$PWD/.venv/bin
native=build/native
vm=$PWD/build/vm
export PATH=$PATH:/sbin:/usr/sbin

say() { printf 'storage: %s\n' "$*"; }
skip() {
  echo "SKIPPED: readers on NVMe and NFS in a virtual machine: $*"
  exit 0
}

# 1. Packages.
[[ $(uname -m) == x86_64 ]] || skip "made for x86-64, this is $(uname -m)"
command -v apt-get >/dev/null || skip "the guest's kernel comes from Debian packages, and there is no apt-get"
declare -A package_of=([qemu-system-x86_64]=qemu-system-x86 [mkfs.ext4]=e2fsprogs [mkfs.xfs]=xfsprogs
  [dmsetup]=dmsetup [cpio]=cpio)
missing_packages() {
  for program in "${!package_of[@]}"; do
    command -v "$program" >/dev/null || echo "${package_of[$program]}"
  done
  echo '#include <doctest/doctest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1 || echo doctest-dev
}
missing=$(missing_packages | tr '\n' ' ')
if [[ -n $missing ]]; then
  say "installing system packages: $missing"
  # shellcheck disable=SC2086  # a list of words
  scripts/apt_install.sh $missing || true
  missing=$(missing_packages | tr '\n' ' ')
  [[ -z $missing ]] || skip "missing: $missing(Debian: apt-get install $missing)"
fi

# 2. The guest's kernel and busybox.
guest=$vm/$VM_KERNEL
if [[ ! -f $guest/.unpacked ]]; then
  apt-cache show "$VM_KERNEL" >/dev/null 2>&1 || scripts/apt_install.sh || true  # for its lists of packages
  # The package that a name without a version stands for.
  kernel=$(apt-cache depends --important "$VM_KERNEL" 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }') || true
  kernel=${kernel:-$VM_KERNEL}
  say "downloading $kernel and busybox-static"
  rm -rf "$guest"
  mkdir -p "$guest/packages"
  (cd "$guest/packages" &&
    timeout "$DOWNLOAD_SECONDS" apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$kernel" busybox-static) \
    >"$vm/download.log" 2>&1 || skip "no package within $DOWNLOAD_SECONDS s: $(tail -n 1 "$vm/download.log")"
  for package in "$guest"/packages/*.deb; do dpkg-deb -x "$package" "$guest"; done
  rm -r "$guest/packages"
  [[ -e $guest/lib ]] || ln -s usr/lib "$guest/lib"  # where /lib is one with /usr/lib
  find "$guest/lib/modules" -name '*.ko.xz' -exec xz -d {} +
  touch "$guest/.unpacked"
fi
busybox=$(find "$guest" -name busybox -path '*/bin/*' | head -n 1)
release=$(ls "$guest/lib/modules")

# 3. What it runs.
say "building the native programs in $native"
"$bin/cmake" -S . -B "$native" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DWEIGHTLIFT_BUILD_TESTS=ON -DWEIGHTLIFT_WERROR=ON >"$native.log" 2>&1 || { cat "$native.log"; exit 1; }
"$bin/ninja" -C "$native" --quiet load_file test_readers test_pipeline

# 4. Its files: the programs with their libraries, and the modules with what they depend on.
work=$(mktemp -d "$vm/run.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,dev,etc,proc,sys,tmp} "$root/lib/modules/$release"
cp "$busybox" "$root/bin/"
for program in "$native"/tests/vm/load_file "$native"/tests/native/test_{readers,pipeline} "$(command -v dmsetup)"; do
  cp "$program" "$root/bin/"
  while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
  done < <(ldd "$program" | grep -o '/[^ ]*')
done
"$busybox" depmod -b "$guest" "$release"
needed='/(xfs|nfsd|nfsv4|dm-mod|crc32c_generic)\.ko:'
for module in $(grep -E "$needed" "$guest/lib/modules/$release/modules.dep" | tr -d :); do
  mkdir -p "$root/lib/modules/$release/$(dirname "$module")"
  cp "$guest/lib/modules/$release/$module" "$root/lib/modules/$release/$module"
done
"$busybox" depmod -b "$root" "$release"
cp tests/vm/init.sh "$root/init"
cp tests/vm/scenarios.sh "$root/"
cp tests/vm/nfs_server.sh "$root/bin/nfs_server"
chmod +x "$root/init" "$root/bin/nfs_server"
(cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) >"$work/initrd.gz"

# 5. The namespaces of its disk: ext4, xfs, what the server exports, and what the device-mapper spoils.
disks=()
for name in ext4 xfs export faulty; do
  truncate -s 320M "$work/$name"
  if [[ $name == xfs ]]; then mkfs.xfs -fq "$work/$name"; else mkfs.ext4 -Fq "$work/$name"; fi
  disks+=(-drive "file=$work/$name,if=none,id=$name,format=raw" -device "nvme-ns,drive=$name")
done

# 6. Boot. Under emulation everywhere, so that it behaves alike: no time from here says anything. On a
# machine that is busy, the kernel's check of its timer would fail.
say "booting Linux $release, for $VM_SECONDS s at most"
console=$vm/console.log
status=0
timeout "$VM_SECONDS" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 1536 \
  -display none -nic none -no-reboot -serial "file:$console" -serial stdio \
  -kernel "$guest/boot/vmlinuz-$release" -initrd "$work/initrd.gz" -append 'console=ttyS0 panic=-1 quiet no_timer_check' \
  -device nvme,serial=weightlift "${disks[@]}" </dev/null 2>"$vm/qemu.log" | sed -u 's/\r$//' | tee "$vm/table.txt" ||
  status=$?
if ! grep -qE '^[0-9]+ scenarios, 0 wrong$' "$vm/table.txt"; then
  # A scenario that hangs is WRONG as well, after a limit of its own (240 s): what is slow here is the machine, unless it
  # hangs where nothing can end it, and no row has come since.
  age=$(($(date +%s) - $(stat -c %Y "$vm/table.txt")))
  if ((status == 124 && age < 240)) && ! grep -qF '| WRONG |' "$vm/table.txt"; then
    skip "the guest did not end within $VM_SECONDS s; $(grep -cF '| ok    |' "$vm/table.txt") scenarios were right until then"
  fi
  tail -n 20 "$vm/qemu.log" "$console"
  exit 1
fi
