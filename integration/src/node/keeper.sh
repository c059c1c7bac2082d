# Ends a node: kills whatever still runs in its cgroups, then removes what it left on the host.
#   keeper.sh NAME FOLDER...
# Waits for the end of its stdin first. That end comes when the test drops the node, and just as well when the test is
# SIGKILLed; so nothing of a node can outlive its test. It runs in the host's mount namespace, where none of the node's
# mounts exist: removing the folders cannot reach through one of them.
set -u
name=$1; shift
slice=$(echo "$name" | tr - _).slice
# half a minute for each step: processes end and release files in their own time, also on a busy machine
while read -r _; do :; done

trees() {
  for tree in /sys/fs/cgroup/"$name" /sys/fs/cgroup/*/"$name" /sys/fs/cgroup/"$slice"; do
    if [ -d "$tree" ] && [ ! -L "${tree%/*}" ]; then echo "$tree"; fi
  done
}
in_trees() {
  roots=$(trees)
  # Without a path, find(1) searches the working directory.
  # shellcheck disable=SC2086
  [ -z "$roots" ] || find $roots "$@" 2>/dev/null
}
members() {
  in_trees -name cgroup.procs -exec cat {} + | sort -u
}
thaw() { # a frozen process of a v1 freezer does not even die of SIGKILL
  in_trees -name freezer.state | while read -r state; do echo THAWED > "$state"; done 2>/dev/null
}

tries=0
while left=$(members); [ -n "$left" ] && [ $tries -lt 600 ]; do
  # shellcheck disable=SC2086
  kill -9 $left 2>/dev/null
  thaw
  tries=$((tries + 1)); sleep 0.05
done
[ -z "$left" ] || echo "keeper of $name: these processes do not end: $left" >&2

# A client is no part of the node, and one whose containerd was killed waits for it for ever.
grep -lzE "(^|/)$name(/|\$)" /proc/[0-9]*/cmdline 2>/dev/null | while IFS=/ read -r _ _ pid _; do
  case $(readlink "/proc/$pid/exe") in */ctr) kill -9 "$pid" 2>/dev/null ;; esac
done

# systemd keeps the cgroup of a slice that it has begun, and the name of what the kernel killed in one
if [ -d "/sys/fs/cgroup/$slice" ]; then
  systemctl stop "$slice"
  systemctl reset-failed "$name-*.scope" 2>/dev/null
fi

tries=0
while [ -n "$(trees)" ] && [ $tries -lt 600 ]; do
  in_trees -depth -type d -exec rmdir {} +
  tries=$((tries + 1)); [ -z "$(trees)" ] || sleep 0.05
done
[ -z "$(trees)" ] || echo "keeper of $name: cgroups stay:" $(trees) >&2

for folder in "$@"; do
  case $folder in */bgt-*) ;; *) echo "keeper of $name: will not remove $folder" >&2; continue ;; esac
  losetup --list --noheadings --raw --output NAME,BACK-FILE 2>/dev/null | while read -r device file; do
    case $file in "$folder"/*) losetup --detach "$device" ;; esac
  done
  tries=0
  until rm -rf "$folder" 2>/dev/null || [ $tries -ge 600 ]; do tries=$((tries + 1)); sleep 0.05; done
  [ ! -e "$folder" ] || echo "keeper of $name: $folder stays" >&2
done
