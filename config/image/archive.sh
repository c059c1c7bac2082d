#!/bin/sh
# Writes the image of config/image/Dockerfile as an OCI archive from built programs, without a container engine.
#   archive.sh ARCHITECTURE DIR NAME FILE     such as: archive.sh arm64 target/arm64/cargo/... bindguard-node:0.1.0 image.tar
# NAME is the image's name after `ctr images import`. The same programs give the same bytes: SOURCE_DATE_EPOCH is the time of
# every file.
set -eu
architecture=$1 programs=$2 name=$3 file=$4
time=${SOURCE_DATE_EPOCH:-0}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/layer/usr/local/bin" "$work/archive/blobs/sha256"

# The arguments are a tar file's name, a folder and the files in it.
pack() {
  to=$1 from=$2; shift 2
  tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$time" --file "$to" --directory "$from" "$@"
}
digest() { sha256sum "$1" | cut -d ' ' -f 1; }
# Moves a file to the blobs, and prints its descriptor.
blob() {
  hash=$(digest "$2")
  printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%s' "$1" "$hash" "$(stat --format=%s "$2")"
  mv "$2" "$work/archive/blobs/sha256/$hash"
}

for program in containerd-shim-bindguard-v2 bindguard-runtime bindguard bindguard-agent; do
  install -m 0755 "$programs/$program" "$work/layer/usr/local/bin/"
done
pack "$work/layer.tar" "$work/layer" usr
unpacked=$(digest "$work/layer.tar")
gzip --no-name "$work/layer.tar"
layer=$(blob layer.v1.tar+gzip "$work/layer.tar.gz")}

created=$(date --utc --date="@$time" +%Y-%m-%dT%H:%M:%SZ)
printf '{"created":"%s","architecture":"%s","os":"linux","config":{"Env":["PATH=/usr/local/bin"],"Cmd":["bindguard","--help"]},' \
  "$created" "$architecture" > "$work/config"
printf '"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "$unpacked" >> "$work/config"
config=$(blob config.v1+json "$work/config")}
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":%s,"layers":[%s]}' \
  "$config" "$layer" > "$work/manifest"
manifest=$(blob manifest.v1+json "$work/manifest")
printf '{"schemaVersion":2,"manifests":[%s,"platform":{"architecture":"%s","os":"linux"},"annotations":{"%s":"%s","%s":"%s"}}]}' \
  "$manifest" "$architecture" io.containerd.image.name "$name" org.opencontainers.image.ref.name "${name##*:}" \
  > "$work/archive/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' > "$work/archive/oci-layout"
pack "$file" "$work/archive" blobs index.json oci-layout
