#!/bin/sh
# Runs modules of static test programs as root on the newest kernel, which enforces the SELinux policy beside this script.
#   run-selinux.sh KERNELS MODULES PROGRAM...     KERNELS: what fetch.sh made
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/vm.sh"

kernels=$1; shift
vm_root "$@"
checkpolicy -U allow -c 30 -o "$vm/root/selinux-policy" "$here/selinux.conf"
kernel=$(printf '%s\n' "$kernels"/vmlinuz-* | sort -V | tail -n 1)
vm_append=security=selinux
vm_boot "$kernel" 1024
