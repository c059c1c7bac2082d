# Sourced by scripts that take packages of several Debian suites without installing them.
#   begin SCRIPT DIR RESULT     makes DIR and waits for another process that fills it; ends the script when this edition of it has done so
#   finish RESULT               puts DIR/making/RESULT in place, and notes who made it
#   suite_lists SUITE           fetches the suite's lists
#   suite_apt SUITE TOOL ARGS...      runs an apt tool on that suite
#   unpack SUITE TREE PACKAGE...      fetches packages, and unpacks them into TREE
#   lay_out PROGRAM TREE BIN    puts a program of TREE into BIN, so that it runs here
#   find_go DIR VERSION         sets PATH to a Go compiler of this version or newer: the machine's, else the newest suite's, in DIR/go
#   newest_go TREE              unpacks the newest suite's Go compiler into TREE, and sets GOROOT and PATH to it
# `dir` is DIR's own path, and `apt_dir` where apt keeps lists and packages of its own; the machine's own stay as they are.
# Packages come from the mirror that the machine's own apt uses.

# A run that was broken off, and a DIR that was moved (its path is baked into programs), are noticed by the stamp.
begin() {
  mkdir -p "$2"
  dir=$(cd "$2" && pwd -P)
  exec 9>"$dir/lock"
  flock 9
  stamp="$dir $(dpkg --print-architecture) $(cat "$1" "${1%/*}/../debian.sh" | cksum)"
  if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
  command -v patchelf >/dev/null || { echo "$1: patchelf is missing: run integration/matrix/setup.sh" >&2; exit 1; }
  rm -rf "$dir/stamp" "${dir:?}/$3" "$dir/x" "$dir/making"
  apt_dir=$dir/making
  mkdir -p "$apt_dir"
}

finish() {
  mv "$dir/making/$1" "$dir/$1"
  rm -rf "$dir/making"
  echo "$stamp" > "$dir/stamp"
}

# apt knows its mirror once it has lists; before that, its sources say it. Security updates live elsewhere.
debian_mirror() {
  { apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
      sed -n 's/^Debian Debian //p'
    cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.* 2>/dev/null |
      sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) .*/\2/p' | grep -v security
  } | head -n 1
}

suite_lists() {
  mirror=$(debian_mirror)
  [ -n "$mirror" ] || { echo "apt has no Debian mirror" >&2; return 1; }
  mkdir -p "$apt_dir/$1/lists/partial" "$apt_dir/$1/cache/archives/partial" "$apt_dir/$1/state"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $1 main" > "$apt_dir/$1/sources.list"
  suite_apt "$1" apt-get -qq update
}

# A mirror may be days behind, and sid's lists are good for a week only: they are signed anyway.
suite_apt() {
  suite_root=$apt_dir/$1; tool=$2; shift 2
  "$tool" -o "Dir::Etc::sourcelist=$suite_root/sources.list" -o Dir::Etc::sourceparts=/nonexistent \
    -o "Dir::State=$suite_root/state" -o "Dir::State::lists=$suite_root/lists" -o Dir::State::status=/dev/null \
    -o "Dir::Cache=$suite_root/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3 -o Acquire::Languages=none \
    -o Acquire::Check-Valid-Until=false "$@"
}

unpack() {
  suite=$1; tree=$2; shift 2
  echo "fetching from $suite: $*" | cut -c 1-120 >&2
  mkdir -p "$apt_dir/$suite/deb" "$tree"
  (cd "$apt_dir/$suite/deb" && suite_apt "$suite" apt-get -qq download "$@")
  for package in "$apt_dir/$suite"/deb/*.deb; do dpkg-deb -x "$package" "$tree"; done
}

# A program whose libraries the machine has not gets those of its tree baked in, and the loader that belongs to them where
# the tree has one. A wrapper around ld.so would not do for runc, which executes /proc/self/exe again.
lay_out() {
  found=$(find "$2/usr/bin" "$2/usr/sbin" -name "$1" 2>/dev/null | head -n 1)
  [ -n "$found" ] || { echo "no $1 in $2" >&2; return 1; }
  mkdir -p "$3"
  if ldd "$found" 2>&1 | grep -q 'not found'; then
    loader=$(find "$2" -name 'ld-linux*.so.*' | head -n 1)
    cp -L "$found" "$3/$1"
    patchelf ${loader:+--set-interpreter "$loader"} --force-rpath \
      --set-rpath "$(find "$2" -name '*.so.*' -exec dirname {} \; | sort -u | tr '\n' ':')" "$3/$1"
  else
    ln -s "$found" "$3/$1"
  fi
}

newest_go() {
  go=$(suite_apt sid apt-cache depends golang-go | sed -n 's/.*Depends: \(golang-1\.[0-9]*\)-go$/\1/p')
  unpack sid "$1" "$go-go" "$go-src"
  export GOROOT="$1/usr/lib/go-${go#golang-}"
  # Debian keeps the standard library's sources in another folder, with links to it.
  rm -rf "$GOROOT/src" "$GOROOT/test"
  mv "$1/usr/share/go-${go#golang-}/src" "$GOROOT/src"
  for folder in api lib misc; do
    [ ! -L "$GOROOT/$folder" ] || { rm "$GOROOT/$folder"; mv "$1/usr/share/go-${go#golang-}/$folder" "$GOROOT/$folder" 2>/dev/null || true; }
  done
  rm -rf "$1/usr/share/go-${go#golang-}"
  export PATH="$GOROOT/bin:$PATH"
}

find_go() {
  has=$(go env GOVERSION 2>/dev/null | sed 's/^go//')
  if [ "$(printf '%s\n' "$2" "$has" | sort -V | head -n 1)" = "$2" ]; then return; fi
  if [ ! -x "$1/go/bin/go" ]; then
    apt_dir=$1/go-making
    rm -rf "$apt_dir" "$1/go"
    mkdir -p "$apt_dir"
    suite_lists sid
    newest_go "$apt_dir/x"
    mv "$GOROOT" "$1/go"
    rm -rf "$apt_dir"
  fi
  export GOROOT="$1/go" PATH="$1/go/bin:$PATH"
}
