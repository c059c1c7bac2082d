#!/bin/sh
# Builds the newest Kubernetes from its Go modules, which `go` fetches and checks. Installs nothing.
#   go.sh DIR
# Result: DIR/bin/{etcd,kube-apiserver,kube-controller-manager,kube-scheduler,kubectl,kubelet,kubelet-unfixed} and DIR/version.
# kubelet-unfixed is the kubelet without its check of a subpath's mount (kubernetes#89629). Takes twenty minutes of two processors, once: seconds where go's cache has them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
mkdir -p "$1"
dir=$(cd "$1" && pwd -P)
exec 9>"$dir/lock"
flock 9
module=$here/go/kubernetes-1.37
stamp=$(cat "$here/go.sh" "$here"/go/*/go.mod "$here"/go/*/go.sum | cksum)
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

rm -rf "$dir/bin" "$dir/making" "$dir/unfixed"
mkdir -p "$dir/making"
find_go "$dir" "$(sed -n 's/^go //p' "$here"/go/*/go.mod | sort -V | tail -n 1)"
export GOTOOLCHAIN=local GOFLAGS='-mod=readonly -buildvcs=false -trimpath' CGO_ENABLED=0
version=$(sed -n 's,.*k8s.io/kubernetes \(v[^ ]*\).*,\1,p' "$module/go.mod")
set -- -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version -X k8s.io/client-go/pkg/version.gitVersion=$version"

echo "building Kubernetes $version from its Go modules: twenty minutes" >&2
(cd "$here/go/etcd-3.7" && go build -ldflags '-s -w' -o "$dir/making/etcd" go.etcd.io/etcd/server/v3)
cd "$module"
go build "$@" -o "$dir/making/" k8s.io/kubernetes/cmd/kubelet k8s.io/kubernetes/cmd/kube-apiserver \
  k8s.io/kubernetes/cmd/kube-controller-manager k8s.io/kubernetes/cmd/kube-scheduler k8s.io/kubernetes/cmd/kubectl
# go refuses an overlay on a file of its module cache, so the unfixed kubelet is built from a copy of the module.
cp -r "$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)" "$dir/unfixed"
chmod -R u+w "$dir/unfixed"
checks=$dir/unfixed/pkg/volume/util/subpath/subpath_linux.go
looks='if !samePath {'
grep -qF "$looks" "$checks" || { echo "$0: no '$looks' in $checks" >&2; exit 1; }
sed -i "s/$looks/if false \&\& !samePath {/" "$checks"
cp go.mod "$dir/unfixed.mod"
cp go.sum "$dir/unfixed.sum"
go mod edit -replace "k8s.io/kubernetes=$dir/unfixed" "$dir/unfixed.mod"
go build "$@" -modfile "$dir/unfixed.mod" -o "$dir/making/kubelet-unfixed" k8s.io/kubernetes/cmd/kubelet
rm -rf "$dir/unfixed" "$dir/unfixed.mod" "$dir/unfixed.sum"
mv "$dir/making" "$dir/bin"
echo "${version#v}" | cut -d . -f 1,2 > "$dir/version"
echo "$stamp" > "$dir/stamp"
