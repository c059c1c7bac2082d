#!/bin/sh
# Fetches what an emulated arm64 machine runs: a kernel, busybox, containerd and runc, all of Debian. Installs nothing.
#   fetch.sh DIR
# Result: DIR/node/{vmlinuz,overlay.ko,busybox} and DIR/node/root with containerd, runc, script(1) and their libraries.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"

begin "$here/fetch.sh" "$1" node
PATH=$PATH:/usr/sbin:/sbin
node=$dir/making/node
export APT_CONFIG=$dir/making/apt.conf
echo 'APT::Architecture "arm64"; APT::Architectures "arm64";' > "$APT_CONFIG"

suite_lists trixie
kernel=$(suite_apt trixie apt-cache depends linux-image-cloud-arm64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
unpack trixie "$dir/x/kernel" "$kernel" busybox-static
mkdir -p "$node/root"
mv "$(find "$dir/x/kernel" -type f -name 'vmlinuz*')" "$node/vmlinuz"
overlay=$(find "$dir/x/kernel" -name 'overlay.ko*')
case $overlay in *.xz) xz -dc "$overlay" > "$node/overlay.ko" ;; *) cp "$overlay" "$node/overlay.ko" ;; esac
mv "$dir/x/kernel/usr/bin/busybox" "$node/busybox"

suite_lists sid
libraries=$(suite_apt sid apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
  --no-enhances containerd runc | grep '^lib' | sort -u)
# shellcheck disable=SC2086
unpack sid "$dir/x/node" containerd runc bsdutils $libraries
for folder in bin sbin lib; do ln -s "usr/$folder" "$node/root/$folder"; done
mkdir -p "$node/root/usr/sbin" "$node/root/matrix/v/containerd-2.4/bin"
(cd "$dir/x/node/usr/lib" && rm -rf ./*/gconv systemd ./*/perl*)
for folder in bin sbin lib; do
  [ ! -e "$dir/x/node/usr/$folder" ] || cp -a "$dir/x/node/usr/$folder/." "$node/root/usr/$folder/"
done
for program in containerd ctr containerd-shim-runc-v2 runc; do
  ln -s "$(cd "$node/root" && ls usr/*bin/$program | sed 's,^,/,')" "$node/root/matrix/v/containerd-2.4/bin/$program"
done
finish node
