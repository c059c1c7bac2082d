#!/bin/sh
# Runs static test programs as root on other kernels, in small virtual machines (software emulation).
#   run.sh KERNELS PROGRAM...     KERNELS: a folder with vmlinuz-* files, see fetch.sh
# Fails when a program fails on a kernel, or does not come to its end.
set -eu
kernels=$1; shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

mkdir -p "$work/root/bin" "$work/root/tests"
cp "$(command -v busybox)" "$work/root/bin/busybox"
for program in "$@"; do cp "$program" "$work/root/tests/$(basename "$program" | sed 's/-[0-9a-f]*$//')"; done
cp "$(dirname "$0")/init" "$work/root/init"
chmod 755 "$work/root/init"
(cd "$work/root" && find . | cpio --quiet -o -H newc | gzip -1) > "$work/initrd"

failed=0
for kernel in "$kernels"/vmlinuz-*; do
  echo "== Linux ${kernel##*/vmlinuz-}"
  timeout 300 qemu-system-x86_64 -accel tcg -m 1024 -nographic -no-reboot -kernel "$kernel" -initrd "$work/initrd" \
    -append "console=ttyS0 panic=-1 quiet" < /dev/null 2>&1 | tr -d '\r' > "$work/log" || true
  grep -aE '^(test |SKIPPED|== |thread )' "$work/log" || true
  if ! grep -aq '^== all passed' "$work/log"; then
    failed=1
    tail -n 40 "$work/log"
  fi
done
exit $failed
