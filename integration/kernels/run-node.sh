#!/bin/sh
# Runs stories on a node as most are today: systemd as first process and as cgroup manager, cgroup v2 as the only hierarchy,
# with each generation of containerd and runc, and with crun.
#   run-node.sh KERNELS MATRIX PROGRAMS MODULES STORIES     MATRIX: see ../matrix/fetch.sh; PROGRAMS: a folder with ours; STORIES: the
#   test program of the stories
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/vm.sh"

kernels=$1; matrix=$2; programs=$3; shift 3
kernel=$(ls "$kernels"/vmlinuz-6.12*)
cp -a "$kernels/systemd" "$vm/root"
vm_root "$@"

# at the same path: it is baked into some of the programs; the C library of systemd's suite serves them all
add() { mkdir -p "$vm/root$(dirname "$1")"; [ -e "$vm/root$1" ] || cp -L "$1" "$vm/root$1"; }
for suite in trixie sid containerd-2.3 containerd-2.4; do
  for program in containerd ctr containerd-shim-runc-v2 runc crun; do
    file=$matrix/v/$suite/bin/$program
    add "$file"
    ldd "$file" 2>/dev/null | grep -o '/[^ )]*' | sort -u | while read -r library; do add "$library"; done
  done
done
mkdir "$vm/root/programs"
for program in containerd-shim-bindguard-v2 bindguard-runtime bindguard; do cp "$programs/$program" "$vm/root/programs"; done
cp "$kernels/overlay-${kernel##*/vmlinuz-}.ko" "$vm/root/overlay.ko"
sed "s|@MATRIX@|$matrix|" "$here/node" > "$vm/root/node"
mkdir -p "$vm/root/etc/systemd/system"
cp "$here/node.service" "$vm/root/etc/systemd/system"
vm_boot "$kernel" 5000
