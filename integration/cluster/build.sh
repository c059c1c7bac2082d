#!/bin/sh
# Builds kubelet and kube-apiserver from a folder of Kubernetes source, 1.30 or newer. Installs nothing, changes nothing there.
#   build.sh DIR SOURCE
# Result: DIR/bin/{etcd,kube-apiserver,kube-controller-manager,kube-scheduler,kubectl,kubelet,kubelet-unfixed} and DIR/version. The Go compiler, etcd and kubectl are those of Debian's
# newest suite. A source tree with a vendor folder needs no network. Takes ten minutes of two processors, once.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
source=$(cd "$2" && pwd -P)
[ -d "$source/cmd/kubelet" ] || { echo "$0: $source has no cmd/kubelet: is it Kubernetes source?" >&2; exit 1; }
version=$(ls "$source"/CHANGELOG/CHANGELOG-1.*.md | sed 's/.*CHANGELOG-//; s/\.md$//' | sort -V | tail -n 1)

begin "$here/build.sh" "$1" bin
suite_lists sid
unpack sid "$dir/x" etcd-server kubectl
newest_go "$dir/go"
export GOPATH="$apt_dir/gopath" GOCACHE="$apt_dir/gocache" GOTOOLCHAIN=local CGO_ENABLED=0

# kubelet-unfixed is the kubelet as it was before kubernetes#89629, which checks a subpath's mount before it leaves it as it is.
fixed=pkg/volume/util/subpath/subpath_linux.go
check='if !samePath {'
grep -qF "$check" "$source/$fixed" || { echo "$0: no '$check' in $source/$fixed" >&2; exit 1; }
sed "s/$check/if false \&\& !samePath {/" "$source/$fixed" > "$apt_dir/unfixed.go"
echo "{\"Replace\": {\"$source/$fixed\": \"$apt_dir/unfixed.go\"}}" > "$apt_dir/unfixed.json"

build() { # NAME COMMAND [FLAG...]
  name=$1; command=$2; shift 2
  (cd "$source" && go build "$@" -o "$apt_dir/bin/$name" \
    -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$version.0 -X k8s.io/client-go/pkg/version.gitVersion=v$version.0" "./cmd/$command")
}
mkdir -p "$apt_dir/bin"
echo "building kubelet, kube-apiserver and the controllers, $version: ten minutes" >&2
build kubelet kubelet
build kubelet-unfixed kubelet -overlay "$apt_dir/unfixed.json"
build kube-apiserver kube-apiserver
build kube-controller-manager kube-controller-manager
build kube-scheduler kube-scheduler
lay_out etcd "$dir/x" "$apt_dir/bin"
lay_out kubectl "$dir/x" "$apt_dir/bin"
rm -rf "$dir/go"
echo "$version" > "$dir/version"
finish bin
