#!/bin/sh
# `make demo`: sets up, fetches, builds and shows, with the time that each step takes.
#   demo.sh DEMO     DEMO: the program that `make programs` builds
set -eu
demo=$1

step() {
  name=$1; shift
  number=$((number + 1))
  echo "== step $number of 4: $name"
  began=$(date +%s)
  "$@"
  steps="$steps$(printf '  %-52s %4d s' "$name" $(($(date +%s) - began)))
"
}

steps= number=0
echo "make demo installs missing Debian packages; containerd, runc and crun are only unpacked below target"
step "install missing packages" sh integration/matrix/setup.sh
step "fetch two generations of containerd, runc and crun" sh integration/matrix/fetch.sh target/matrix
step "build the programs, not optimized" make --no-print-directory programs
step "run the demo" "$demo"
printf '\nTime of each step:\n%s' "$steps"
cat <<'END'

Next:
  is a node of yours affected?   grep '//deleted .*/volume-subpaths/' /proc/1/mountinfo
  one node first                 docs/install.md
  all tests, on this machine     make test
END
