#!/bin/sh
# Installs the missing programs of the machine that build and run the integration stories.
#   setup.sh [PROGRAM:PACKAGE...]     further programs or files that a target of the Makefile needs
# For Debian and its relatives. Installing needs root; without missing programs there is no output.
set -eu

# program package why
wanted='busybox busybox-static the containers of the stories run it
patchelf patchelf newer runc and crun get their own loader
protoc protobuf-compiler the CRI client is generated when it is built
unshare util-linux namespaces
losetup mount loop devices
mount mount loop mounts
mount.fuse3 fuse3 root filesystems that a program serves
mkfs.ext4 e2fsprogs a kubelet with a filesystem of its own
mkfs.xfs xfsprogs the same, with xfs
mkfs.btrfs btrfs-progs the same, with btrfs
bindfs bindfs a FUSE daemon that dies
modprobe kmod the loop module
cc gcc,libc6-dev the crates that link
c++ g++ libFuzzer
strace strace the syscalls of the guard fail one after the other
systemd-tmpfiles systemd-standalone-tmpfiles the folders that a package makes
flock util-linux one fetch at a time
/usr/bin/python3 python3 an NRI plugin and the registry of make suites'

for more in "$@"; do wanted="$wanted
${more%%:*} ${more#*:}"; done

# Debian has dynamic and static packages of busybox: only a static one runs in an empty root filesystem
is_there() {
  case $1 in /*) [ -e "$1" ]; return ;; esac
  found=$(PATH=$PATH:/usr/sbin:/sbin command -v "$1") || return 1
  [ "$1" != busybox ] || ! ldd "$found" >/dev/null 2>&1
}

missing=$(echo "$wanted" | while read -r program packages _; do is_there "$program" || echo "$packages"; done | tr ',' '\n' | sort -u)
if [ -n "$missing" ]; then
  export DEBIAN_FRONTEND=noninteractive
  echo "installing $(echo "$missing" | wc -l) packages:" $missing >&2
  log=$(mktemp)
  retrying='-o Acquire::Retries=3'
  # shellcheck disable=SC2086
  if ! { apt-get -qq $retrying update && apt-get -qq -y $retrying --no-install-recommends install $missing; } >"$log" 2>&1; then
    cat "$log" >&2; rm -f "$log"
    echo "setup.sh: could not install:" $missing >&2
    exit 1
  fi
  rm -f "$log"
fi

[ -e /dev/loop-control ] || modprobe loop 2>/dev/null || echo "setup.sh: no loop devices here; the stories that need one will be skipped" >&2
