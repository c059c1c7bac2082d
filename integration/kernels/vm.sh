# Sourced by scripts that run test programs in small virtual machines (software emulation).
#   vm_root MODULES PROGRAM...    begins a root filesystem in $vm with busybox, init and these programs; MODULES: which of their
#                                 modules run
#   vm_boot KERNEL MEMORY ARGUMENTS...    boots it; prints the programs' closing lines; fails unless all passed
# For another architecture, set vm_busybox (a static busybox), vm_qemu and vm_console after sourcing this. vm_append comes on
# the kernel's command line.
vm=$(mktemp -d)
trap 'rm -rf "$vm"' EXIT INT TERM

vm_busybox=$(command -v busybox)
# the emulator's default processor is an old one, with which Linux 6.12 ends in double faults now and then; of the newest
# one it gets the 16-byte compare-and-exchange wrong
vm_qemu='qemu-system-x86_64 -accel tcg -cpu max,-cx16'
vm_console=ttyS0
vm_append=

vm_root() {
  mkdir -p "$vm/root/bin" "$vm/root/tests"
  cp "$vm_busybox" "$vm/root/bin/busybox"
  echo "$1" > "$vm/root/modules"; shift
  cp "$@" "$vm/root/tests"
  cp "$here/init" "$vm/root/init"
  chmod 755 "$vm/root/init"
}

vm_boot() {
  (cd "$vm/root" && find . | cpio --quiet -o -H newc | gzip -1) > "$vm/initrd"
  kernel=$1; memory=$2; shift 2
  echo "== Linux ${kernel##*/vmlinuz-}"
  # What the kernel does about faults of real processors takes a third of the time. And one processor: the emulator's threads do
  # not agree on code that the kernel rewrites while it runs. On a busy machine the emulated timer is late, and the kernel's test
  # of it at boot panics.
  # shellcheck disable=SC2086
  timeout 3600 $vm_qemu -m "$memory" -nographic -no-reboot -kernel "$kernel" -initrd "$vm/initrd" \
    -append "console=$vm_console panic=-1 quiet mitigations=off no_timer_check $vm_append" "$@" < /dev/null 2>&1 | tr -d '\r' > "$vm/log" || true
  # the message of a panic is the lines after the thread's
  awk '/^thread /{n = 4} n-- > 0 || /^(test |SKIPPED|== |on containerd )/' "$vm/log"
  grep -aq '^== all passed' "$vm/log" || { tail -n 60 "$vm/log"; return 1; }
}
