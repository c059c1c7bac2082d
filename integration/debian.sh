# Sourced by scripts that take packages of several Debian suites without installing them.
#   apt_dir=DIR       where apt keeps lists and packages of its own; the machine's own stay as they are
#   suite_lists SUITE     fetches the suite's lists
#   suite_apt SUITE TOOL ARGS...     runs an apt tool on that suite
# Packages come from the mirror that the machine's own apt uses.

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

suite_apt() {
  suite_root=$apt_dir/$1; tool=$2; shift 2
  "$tool" -o "Dir::Etc::sourcelist=$suite_root/sources.list" -o Dir::Etc::sourceparts=/nonexistent \
    -o "Dir::State=$suite_root/state" -o "Dir::State::lists=$suite_root/lists" -o Dir::State::status=/dev/null \
    -o "Dir::Cache=$suite_root/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3 -o Acquire::Languages=none "$@"
}
