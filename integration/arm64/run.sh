#!/bin/sh
# Runs the guard's tests and stories on an emulated arm64 machine with Debian's containerd and runc.
#   run.sh DIR PROGRAMS MODULES TEST...     DIR: see fetch.sh; PROGRAMS: a folder with ours for aarch64
set -eu
# vm.sh finds init here
here=$(cd "$(dirname "$0")/../kernels" && pwd)
. "$here/vm.sh"

node=$1/node; programs=$2; shift 2
vm_busybox=$node/busybox
vm_qemu='qemu-system-aarch64 -M virt -accel tcg -cpu max,sve=off,pauth-impdef=on'
vm_console=ttyAMA0
cp -a "$node/root" "$vm/root"
vm_root "$@"
mkdir "$vm/root/programs"
for program in containerd-shim-bindguard-v2 bindguard-runtime bindguard bindguard-agent; do cp "$programs/$program" "$vm/root/programs"; done
cp "$node/overlay.ko" "$vm/root/overlay.ko"
cp "$here/../arm64/node" "$vm/root/node-without-systemd"
vm_boot "$node/vmlinuz" 4000
