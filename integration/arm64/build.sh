#!/bin/sh
# Builds for aarch64 on an amd64 machine, with Debian's own cross compiler in a root of its own. Installs nothing.
#   build.sh DIR CARGO-WORDS...       such as: build.sh target/arm64 build --release -p bindguard
# Without words it makes the compiler's root and builds nothing. `auditable build` uses the machine's cargo-auditable.
# DIR/root is the root filesystem with the compiler, DIR/cargo what cargo builds. Both stay for the next call.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
. "$here/../debian.sh"
triple=aarch64-unknown-linux-gnu

mkdir -p "$1"
dir=$(cd "$1" && pwd -P); shift
root=$dir/root
exec 9>"$dir/lock"
flock 9

# The standard library for arm64 has to be the one of exactly this compiler.
make_root() {
  echo "making a root with a cross compiler: two minutes" >&2
  rm -rf "$root"
  debootstrap --variant=minbase --include=rustc,cargo,gcc,make,libc6-dev,gcc-aarch64-linux-gnu,libc6-dev-arm64-cross,protobuf-compiler \
    sid "$root" "$(debian_mirror)" > "$dir/debootstrap.log" || { tail -n 20 "$dir/debootstrap.log" >&2; return 1; }
  chroot "$root" dpkg --add-architecture arm64
  chroot "$root" apt-get -qq -o Acquire::Check-Valid-Until=false update
  standard=$(chroot "$root" apt-cache depends libstd-rust-dev:arm64 | sed -n 's/.*Depends: \(libstd-rust-1[^: ]*\).*/\1/p' | head -n 1)
  (cd "$root/var/tmp" && chroot "$root" sh -c "cd /var/tmp && apt-get -qq -o APT::Sandbox::User=root download libstd-rust-dev:arm64 $standard:arm64")
  for package in "$root"/var/tmp/*.deb; do dpkg-deb -x "$package" "$root"; done
  rm -f "$root"/var/tmp/*.deb
  touch "$root/made"
}
[ -e "$root/made" ] || make_root
[ $# -gt 0 ] || exit 0

# The packages come with the machine's own cargo, which knows its registry; the root has no network of its own to know.
cargo fetch --quiet --locked --manifest-path "$repository/Cargo.toml" --target $triple
mkdir -p "$root/source" "$root/cargo-home" "$dir/cargo"
[ "$1" != auditable ] || cp "$(command -v cargo-auditable)" "$root/usr/bin/"
exec unshare --mount sh -euc '
  root=$1; repository=$2; dir=$3; home=$4; shift 4
  mount --bind "$repository" "$root/source"
  mount --bind "$home" "$root/cargo-home"
  mount --rbind /dev "$root/dev"
  mount -t proc proc "$root/proc"
  mkdir -p "$root$dir/cargo"
  mount --bind "$dir/cargo" "$root$dir/cargo"
  exec chroot "$root" env -i PATH=/usr/bin:/bin HOME=/root CARGO_HOME=/cargo-home CARGO_TARGET_DIR="$dir/cargo" \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 \
    RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static --remap-path-prefix=/source=/bindguard \
      --remap-path-prefix=/cargo-home=/cargo --remap-path-prefix=$dir/cargo=/bindguard/target" \
    sh -c "cd /source && exec cargo \"\$@\" --offline --locked --target aarch64-unknown-linux-gnu" sh "$@"
' sh "$root" "$repository" "$dir" "${CARGO_HOME:-$HOME/.cargo}" "$@"
