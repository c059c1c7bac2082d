#!/bin/sh
# Builds the Debian package of programs that are built already. dpkg-deb, which every Debian has, needs nothing else.
#   build.sh VERSION PROGRAMS FILES PACKAGE     PROGRAMS: the folder of the programs; FILES: the folder of the manuals, completions
#                                               and the units (make package-files); PACKAGE: the file to write
# COMPRESSION: that of dpkg-deb -Z; xz by default.
set -eu
version=$1; programs=$2; files=$3; package=$4
here=$(cd "$(dirname "$0")" && pwd)
config=$(dirname "$here"); source=$(dirname "$config")

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT INT TERM
chmod 755 "$root"

# put MODE FOLDER FILE...
put() { mode=$1; folder=$root/$2; shift 2; install -d -m 755 "$folder"; install -m "$mode" "$@" "$folder"; }
# put_as MODE PATH FILE
put_as() { install -D -m "$1" "$3" "$root/$2"; }

for program in containerd-shim-bindguard-v2 bindguard-runtime bindguard bindguard-agent; do put 755 usr/bin "$programs/$program"; done
put 755 usr/bin "$config/kubectl/kubectl-bindguard"
put 644 etc/bindguard "$config/config.toml"
put 644 etc/logrotate.d "$config/logrotate.d/bindguard"
put 644 usr/lib/tmpfiles.d "$config/tmpfiles.d/bindguard.conf"
put 644 lib/systemd/system "$files/bindguard-agent.service" "$files/bindguard-removal.service" "$config/systemd/bindguard-removal.timer"
# On in a node image, too, where no systemd runs. `systemctl mask` turns it off.
install -d -m 755 "$root/lib/systemd/system/timers.target.wants"
ln -s ../bindguard-removal.timer "$root/lib/systemd/system/timers.target.wants/"
doc=usr/share/doc/bindguard
put 644 $doc/examples "$config"/*.yaml
put 644 $doc/examples/containerd "$config"/containerd/*.toml
put 644 $doc/examples/oci-hooks "$config/oci-hooks/50-bindguard.json"
put 644 $doc "$source/README.md"
put 644 $doc/docs "$source"/docs/*.md
put_as 644 $doc/copyright "$source/LICENSE"
put 644 usr/share/man/man1 "$files"/man/*.1
put 644 usr/share/man/man5 "$files"/man/*.5
gzip -9n "$root"/usr/share/man/man[15]/*
for program in bindguard bindguard-agent; do
  put_as 644 usr/share/bash-completion/completions/$program "$files/$program.bash"
  put_as 644 usr/share/zsh/vendor-completions/_$program "$files/$program.zsh"
  put_as 644 usr/share/fish/vendor_completions.d/$program.fish "$files/$program.fish"
done

put 755 DEBIAN "$here/postinst" "$here/prerm" "$here/postrm"
printf '/etc/bindguard/config.toml\n/etc/logrotate.d/bindguard\n' > "$root/DEBIAN/conffiles"
cat > "$root/DEBIAN/control" <<END
Package: bindguard
Version: $version-1
Architecture: $(dpkg --print-architecture)
Maintainer: The bindguard authors
Section: admin
Priority: optional
Suggests: containerd, docker.io, podman
Installed-Size: $(find "$root" -type f -printf '%s\n' | awk '{ sum += int(($1 + 1023) / 1024) } END { print sum }')
Description: checks and repairs the binds of every container
 Runs between a container runtime's create and runc (or crun): re-binds stale
 Kubernetes subPath mounts, makes binds of the host's root rslave, and reports
 what it cannot repair. Contains a containerd shim, an OCI runtime wrapper, a
 command line and a node agent, whose service is off until an operator enables
 it. A timer finishes a removal that running pods have held up.
END
mkdir -p "$(dirname "$package")"
dpkg-deb --root-owner-group "-Z${COMPRESSION:-xz}" --build "$root" "$package" >/dev/null
