#!/bin/sh
# Builds a real kubelet and what it needs around it, from Debian's packages. Installs nothing.
#   fetch.sh DIR
# Result: DIR/bin/{etcd,kube-apiserver,kube-controller-manager,kube-scheduler,kubectl,kubelet,kubelet-unfixed}, of Kubernetes 1.20, the last whole Kubernetes that
# Debian has the source of. It speaks CRI v1alpha2, which containerd 1.6 and 1.7 do. kubelet-unfixed is the kubelet as it
# was before kubernetes#89629, which checks a subpath's mount before it leaves it as it is. Takes ten minutes of two
# processors, once.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"

begin "$here/fetch.sh" "$1" bin
suite_lists bookworm
unpack bookworm "$dir/x" etcd-server golang-1.19-go golang-1.19-src kubernetes-client
echo "fetching from bookworm: the source of kubernetes" >&2
sed 's/^deb /deb-src /' "$apt_dir/bookworm/sources.list" > "$apt_dir/bookworm/sources"
mv "$apt_dir/bookworm/sources" "$apt_dir/bookworm/sources.list"
suite_apt bookworm apt-get -qq update
(cd "$apt_dir" && suite_apt bookworm apt-get -qq --download-only source kubernetes)

# GOPATH's layout, because the packages are vendored and the build must not use the network
export GOROOT="$dir/x/usr/lib/go-1.19" GOPATH="$apt_dir/gopath" GOCACHE="$apt_dir/gocache" GO111MODULE=off
export PATH="$GOROOT/bin:$PATH"
source=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$source" "$apt_dir/bin"
tar -C "$source" --strip-components 1 -xf "$apt_dir"/kubernetes_*.orig.tar.gz
cd "$source"

echo "building kubelet, kube-apiserver and the controllers: ten minutes" >&2
# the one generated file that is not in the source
documented=$(grep -rl --include=*.go '^// +k8s:openapi-gen=true' staging/src/k8s.io pkg | xargs -n 1 dirname |
  sed 's,^staging/src/,vendor/,; s,^,k8s.io/kubernetes/,' | grep -v -e /testdata -e sample -e code-generator | sort -u | paste -sd ,)
go build -o "$apt_dir/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
"$apt_dir/openapi-gen" --logtostderr -i "$documented" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r "$apt_dir/violations"

# The API server answers with the version of client-go, which helm checks.
build() { # NAME COMMAND
  vendored=k8s.io/kubernetes/vendor/k8s.io
  go build -ldflags "-s -w -X $vendored/component-base/version.gitVersion=v1.20.2 -X $vendored/client-go/pkg/version.gitVersion=v1.20.2" \
    -o "$apt_dir/bin/$1" "./cmd/$2"
}
build kube-apiserver kube-apiserver
build kube-controller-manager kube-controller-manager
build kube-scheduler kube-scheduler
build kubelet kubelet
looks='if mntInfo.Root != subpath.Path {'
fixed=pkg/volume/util/subpath/subpath_linux.go
grep -qF "$looks" "$fixed"
sed -i "s/$looks/if false \&\& mntInfo.Root != subpath.Path {/" "$fixed"
build kubelet-unfixed kubelet

lay_out etcd "$dir/x" "$apt_dir/bin"
lay_out kubectl "$dir/x" "$apt_dir/bin"
rm -rf "$GOROOT" "$dir/x/usr/share/go-1.19"
finish bin
