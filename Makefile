# bindguard: the targets.
#
#   make demo     the faults and their repairs, on a private containerd
#   make test     all tests, set-up included; OLDER=1 runs every story on every containerd
#   make lint     formatting, clippy and the packages' licences; CI runs lint and test
#   make story    one story of the tests, such as NAME=live_refresh::
#   make differential  the programs of another build, OLD=, beside today's on the same inputs: two minutes on an idle machine
#   make mutants  changes in the code of core that no test notices: hours, or minutes for some FILES=
#   make fuzz     hostile input for the readers of mount tables, specs, paths and configs: ten minutes, or SECONDS= per target
#   make kernels  the syscalls on Linux 6.1, 6.12 and the newest, in virtual machines, with the kernel's NFS and SMB servers, a 9p share and SELinux
#   make kubelet  volumes of all kinds that need no server under a real kubelet, and the race that it has
#   make suites   critest of cri-tools and containerd's client suite against the stock shim and bindguard, as two tables; an hour
#   make image    the image of the chart, built from these sources by docker; make image-check tries that for both architectures
#   make refresh-apps  real programs that watch a file, after a live refresh; rclone, sshfs and s3fs that die
#   make arm64    the same programs for arm64, tried on an emulated machine
#   make soak     a thousand containers, and the shim's memory afterwards; ten thousand refreshes
#   make deb      a Debian package
#   make pictures the pictures of the README: drawings, and terminals with the output of the real programs
#   make release  the artefacts of a release, built twice: programs, package, chart, images, bills of materials, statement of origin, checksums
#   make bench    bindguard beside every peer, figure by figure, in one run
#
# On a fresh Debian 12 with Rust 1.88 or newer, as root. Each target installs the packages that it needs.

TARGET := $(shell rustc -vV | sed -n 's/^host: //p')
MATRIX := $(CURDIR)/target/matrix
ENGINES := $(CURDIR)/target/engines
CLUSTER := $(CURDIR)/target/cluster
DEB    := $(CURDIR)/target/deb/bindguard.deb
TOOLS  := $(CURDIR)/target/tools
BIN    := $(CURDIR)/target/$(TARGET)/release
DEV    := $(CURDIR)/target/$(TARGET)/debug
FAULTS := $(CURDIR)/target/fault-points

PROGRAMS := -p bindguard-runtime -p bindguard
FAULTY := bindguard-runtime containerd-shim-bindguard-v2 bindguard-agent
NAMES := containerd-shim-bindguard-v2 bindguard-runtime bindguard bindguard-agent

# Built by a call of its own: cargo unites the features of all packages of a call, and the other programs need few.
AGENT := -p bindguard-agent
# As well: the wrapper wants the guard's crates fast, and the shim wants them small.
SHIM := -p containerd-shim-bindguard-v2 $(foreach crate,core sys,--config 'profile.release.package.bindguard-$(crate).opt-level="z"')

# One file each, for any node: glibc linked in, loaded where it was linked (a static-pie needs relocations at start).
# `--target` keeps these flags away from build scripts and procedural macros.
STATIC := -C target-feature=+crt-static -C relocation-model=static

# What the demo and the tests run is not optimized, but static as what a node gets. Measurements use the programs of a release.
CARGO_ENV := RUSTFLAGS="$(STATIC)"
CARGO_STATIC := $(CARGO_ENV) cargo
CARGO_TEST := $(CARGO_STATIC) test --locked --target $(TARGET)
export BINDGUARD_BIN_DIR := $(DEV)
kubelet suites soak refresh-apps bench image-check: export BINDGUARD_BIN_DIR := $(BIN)
export BINDGUARD_FAULTS_DIR := $(FAULTS)
export BINDGUARD_MATRIX := $(MATRIX)
export BINDGUARD_ENGINES := $(ENGINES)
export BINDGUARD_HELM := $(CURDIR)/target/helm
export BINDGUARD_CLUSTER := $(CLUSTER)
export BINDGUARD_DEB := $(DEB)
export BINDGUARD_CONTAINERD
# The shim shows it; empty where these sources are no clone.
export BINDGUARD_REVISION := $(shell git -C $(CURDIR) rev-parse HEAD 2>/dev/null)

.PHONY: all build programs demo pictures test stories story differential mutants fuzz lint deny setup matrix engines helm deb test-deb package-files auditable built-twice pack release image image-check \
  image-folder faults soak suites refresh-apps kernels arm64 peer floor bench clean

all: build

# No folder of the building machine is in a program, so that each folder gives the same bytes.
PACKAGES := $(or $(CARGO_HOME),$(HOME)/.cargo)
REMAP := --remap-path-prefix=$(CURDIR)=/bindguard --remap-path-prefix=$(PACKAGES)=/cargo
BUILD := build

## the programs a node gets, static
build: setup
	RUSTFLAGS="$(STATIC) $(REMAP)" cargo $(BUILD) --locked --release --target $(TARGET) $(PROGRAMS)
	RUSTFLAGS="$(STATIC) $(REMAP)" cargo $(BUILD) --locked --release --target $(TARGET) $(SHIM)
	RUSTFLAGS="$(STATIC) $(REMAP)" cargo $(BUILD) --locked --release --target $(TARGET) $(AGENT)

## the same programs and the demo, not optimized, by one call
programs: setup
	$(CARGO_STATIC) build --locked --target $(TARGET) $(addprefix --bin ,$(NAMES) demo)

## what the machine lacks
setup:
	@need=$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml); have=$$(rustc --version | cut -d ' ' -f 2); \
	  [ "$$(printf '%s\n' "$$need" "$$have" | sort -V | head -n 1)" = "$$need" ] || \
	  { echo "build bindguard: this rustc is $$have; install Rust $$need or newer" >&2; exit 2; }
	sh integration/matrix/setup.sh

## four generations of containerd, runc and crun, side by side; BINDGUARD_CONTAINERD=DIR puts a build of your own in the newest one's place
matrix: setup
	sh integration/matrix/setup.sh pkg-config:pkg-config /usr/include/seccomp.h:libseccomp-dev
	sh integration/matrix/fetch.sh $(MATRIX)
	sh integration/matrix/go.sh $(MATRIX) runc-1.5 containerd-2.4 containerd-2.3
	@sh integration/matrix/versions.sh $(MATRIX)

## Podman and Docker, beside each other
engines: setup
	sh integration/engines/fetch.sh $(ENGINES)

## helm, for the chart's test
helm:
	sh integration/helm/fetch.sh $(CURDIR)/target/helm

## guard, shim and agent with places at which a test can break them; never installed, and not left where programs are looked for
# Of the whole workspace and with an example: then nearly all that they are made of is what `cargo test` builds, too.
faults: setup
	$(CARGO_STATIC) build --locked --target $(TARGET) --workspace $(addprefix --bin ,$(FAULTY)) --example package_files --features \
	  bindguard-runtime/fault-points,containerd-shim-bindguard-v2/fault-points,bindguard-agent/fault-points
	rm -rf $(FAULTS)
	mkdir -p $(FAULTS)
	mv $(addprefix $(DEV)/,$(FAULTY)) $(FAULTS)

## the Debian package, target/deb/bindguard.deb
deb: build package-files
	sh config/debian/build.sh $(VERSION) $(BIN) target/package $(DEB)

# For the tests: the package of the programs that they run, without ten seconds of compression.
test-deb: programs package-files
	COMPRESSION=none sh config/debian/build.sh $(VERSION) $(DEV) target/package $(DEB)

## the manuals, the completions and the units of the package
package-files: programs
	rm -rf target/package
	mkdir -p target/package/man
	$(DEV)/bindguard man --dir target/package/man
	for shell in bash zsh fish; do $(DEV)/bindguard completions $$shell > target/package/bindguard.$$shell || exit 1; done
	$(CARGO_STATIC) build --quiet --locked --target $(TARGET) --example package_files
	$(DEV)/examples/package_files target/package
	sed '1s/ Copy it to.*/ It is off until: systemctl enable --now bindguard-agent/; s,/usr/local/bin/,/usr/bin/,' \
	  config/systemd/bindguard-agent.service > target/package/bindguard-agent.service
	sed 's,/usr/local/bin/,/usr/bin/,' config/systemd/bindguard-removal.service > target/package/bindguard-removal.service

VERSION := $(shell sed -n '/^\[workspace.package\]/,/^version/s/^version = "\(.*\)"/\1/p' Cargo.toml)
DIST := $(CURDIR)/target/dist
SBOM := 0.10.0

OWN_ARCH := $(if $(filter aarch64-%,$(TARGET)),arm64,amd64)
# The other architecture, by the cross compiler of integration/arm64, on an amd64 machine. Empty: only that of the machine.
CROSS ?= $(if $(filter amd64,$(OWN_ARCH)),arm64)
NODE_IMAGE := registry.example.com/bindguard-node:$(VERSION)
IMAGE_FILE := $(DIST)/bindguard-node-$(VERSION)$(if $(CROSS),,-$(OWN_ARCH)).oci.tar

# The programs of a release have the list of their packages inside, for `cargo audit bin`.
AUDITABLE := 0.7.7
release built-twice: BUILD := auditable build
release built-twice: export PATH := $(TOOLS)/bin:$(PATH)

auditable:
	@$(TOOLS)/bin/cargo-auditable auditable --version >/dev/null 2>&1 || \
	  cargo install --quiet --locked --debug --root $(TOOLS) --version $(AUDITABLE) cargo-auditable

AGAIN := $(CURDIR)/target/again
AGAIN_BIN := $(AGAIN)/target/$(TARGET)/release

## fails if the same sources in another folder give other programs
built-twice: auditable build
	rm -rf $(AGAIN)
	mkdir -p $(AGAIN)
	tar --create --exclude-vcs --exclude ./target --exclude './hooks/*/target' . | tar --extract --directory $(AGAIN)
	$(MAKE) --no-print-directory -C $(AGAIN) build BUILD='$(BUILD)' BINDGUARD_REVISION=$(BINDGUARD_REVISION)
	for program in $(NAMES); do cmp $(BIN)/$$program $(AGAIN_BIN)/$$program || exit 1; done

# What a release has beside its descriptions, from the programs in BIN. The chart names the image for both architectures by its digest.
pack:
	rm -rf $(DIST)
	mkdir -p $(DIST)
	tar --create --gzip --sort=name --owner=0 --group=0 --numeric-owner --mode=755 --mtime="@$$SOURCE_DATE_EPOCH" \
	  --file $(DIST)/bindguard-$(VERSION)-$(firstword $(subst -, ,$(TARGET))).tar.gz --directory $(BIN) $(NAMES)
	sh config/debian/build.sh $(VERSION) $(BIN) target/package $(DIST)/bindguard_$(VERSION)_$$(dpkg --print-architecture).deb
	sh config/kubectl/package.sh $(VERSION) $(DIST)
	sh config/image/archive.sh $(NODE_IMAGE) "$(BINDGUARD_REVISION)" $(IMAGE_FILE) $(OWN_ARCH) $(BIN) \
	  $(if $(CROSS),$(CROSS) $(ARM64_BIN))
ifneq ($(CROSS),)
	@if [ -x target/helm/bin/helm ]; then sh config/chart/package.sh target/helm/bin/helm $(IMAGE_FILE) $(DIST); else echo "SKIPPED: no helm, no chart"; fi
endif

## the artefacts of a release, target/dist: programs, package, chart, the image, bills of materials, statement of origin, checksums
release: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
release: built-twice package-files helm
	@cargo sbom --version >/dev/null 2>&1 || cargo install --quiet --locked --debug --root $(TOOLS) --version $(SBOM) cargo-sbom
	sh integration/matrix/setup.sh jq:jq $(if $(CROSS),debootstrap:debootstrap)
ifneq ($(CROSS),)
	sh integration/arm64/build.sh $(ARM64) $(BUILD) --release $(PROGRAMS)
	sh integration/arm64/build.sh $(ARM64) $(BUILD) --release $(SHIM)
	sh integration/arm64/build.sh $(ARM64) $(BUILD) --release $(AGENT)
endif
	@if grep -lF -e '$(CURDIR)' -e '$(PACKAGES)' $(addprefix $(BIN)/,$(NAMES)) $(if $(CROSS),$(addprefix $(ARM64_BIN)/,$(NAMES))); then \
	  echo "release: a folder of this machine is in these programs" >&2; exit 1; fi
	$(MAKE) --no-print-directory pack
	$(MAKE) --no-print-directory pack DIST=$(AGAIN)/dist BIN=$(AGAIN_BIN)
	diff --recursive $(DIST) $(AGAIN)/dist
	rm -rf $(AGAIN)
	cargo sbom --output-format cyclone_dx_json_1_4 > target/programs.cdx.json
	sh config/release.sh $(DIST) $(CURDIR)/target/programs.cdx.json $(VERSION)

DOCKER ?= docker
IMAGE ?= bindguard-node:$(VERSION)
# An image with Rust, a C compiler, make and protoc. It has no default, so that no public registry is used by accident.
BUILD_IMAGE ?=
# Such as linux/arm64; else that of the machine.
PLATFORM ?=
SOURCE := target/image-source

## the image of the chart, built from these sources; BUILD_IMAGE= names the compiler's image, PLATFORM= another architecture
# The packages come with the machine's own cargo, which knows its registry, so the build stage needs no network.
image:
	@[ -n "$(BUILD_IMAGE)" ] || { echo "build the image: BUILD_IMAGE is empty; set it to an image with Rust, C, make and protoc" >&2; exit 2; }
	rm -rf $(SOURCE)
	mkdir -p $(SOURCE)/.cargo
	tar --create --exclude-vcs --exclude ./target --exclude './hooks/*/target' . | tar --extract --directory $(SOURCE)
	cargo vendor --locked $(SOURCE)/vendor > $(SOURCE)/.cargo/config.toml 2> $(SOURCE).log || { cat $(SOURCE).log >&2; exit 1; }
	sed -i 's,$(SOURCE)/vendor,vendor,' $(SOURCE)/.cargo/config.toml
	DOCKER_BUILDKIT=1 $(DOCKER) build --network none --build-arg BUILD_IMAGE=$(BUILD_IMAGE) --build-arg REVISION=$(BINDGUARD_REVISION) \
	  $(if $(PLATFORM),--platform $(PLATFORM)) --tag $(IMAGE) --file $(SOURCE)/config/Dockerfile $(SOURCE)

## the image for both architectures, built with a compiler from Debian's packages; half an hour
image-check: engines matrix
	sh integration/matrix/setup.sh debootstrap:debootstrap
	sh integration/arm64/build.sh $(ARM64)
	$(STORY) image_from_the_sources:: --ignored --nocapture

## the context of config/image/Dockerfile, target/image
image-folder: build
	mkdir -p target/image
	cp config/image/Dockerfile $(BIN)/containerd-shim-bindguard-v2 $(BIN)/bindguard-runtime $(BIN)/bindguard $(BIN)/bindguard-agent target/image/

## the faults with the stock shim, and the same steps with bindguard
demo:
	sh integration/demo.sh $(DEV)/demo

DENY := 0.20.2

## licences, duplicate versions and advisories of the packages, by deny.toml
deny:
	@export PATH="$(TOOLS)/bin:$$PATH"; \
	  if ! cargo deny --version >/dev/null 2>&1 && \
	    ! cargo install --quiet --locked --debug --root $(TOOLS) --version $(DENY) cargo-deny; then \
	    echo "SKIPPED: no cargo-deny here, and none can be installed"; exit 0; fi; \
	  cargo deny --log-level error --locked check licenses bans sources || exit 1; \
	  if cargo deny fetch db >/dev/null 2>&1; then cargo deny --log-level error --locked check advisories; \
	  else echo "SKIPPED: the advisories: their database cannot be fetched"; fi

## formatting and lints, where the toolchain has the components, and deny
lint: setup deny
	@if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check && cargo fmt --manifest-path hooks/fuzz/Cargo.toml --check; else echo "SKIPPED: no rustfmt in this toolchain"; fi
	@if cargo clippy --version >/dev/null 2>&1; then $(CARGO_STATIC) clippy --locked --target $(TARGET) --workspace --all-targets --quiet -- -D warnings; else echo "SKIPPED: no clippy in this toolchain"; fi
	@if grep -rn 'uses:' .github | grep -vE '@[0-9a-f]{40} # v'; then echo "lint: name each action by its commit, with the version as a comment" >&2; exit 1; fi

# Run side by side: a linker or a mirror leaves processor time unused. The output of each target stays together.
SIDE_BY_SIDE := $(MAKE) --no-print-directory --jobs=2 --output-sync=target

test:
	+$(SIDE_BY_SIDE) matrix engines helm faults
	$(CARGO_TEST) --workspace --no-run
	$(MAKE) --no-print-directory test-deb
	$(MAKE) --no-print-directory stories

# OLDER=1: stories about the shim and the guard on the older containerds, too. CI sets this.
export OLDER
stories: ; $(CARGO_ENV) bash integration/stories.sh cargo test --locked --target $(TARGET) --workspace

# STORY MODULE:: WORDS...: the stories of one module
STORY := $(CARGO_TEST) -p bindguard-integration --test it --

## one story, such as NAME=live_refresh::
story: ; $(STORY) $(NAME) --nocapture

# A folder of more specs, such as generated specs.
SPECS ?=

## each difference between the programs in the folder OLD and today's, but of integration/differential-expected
differential: programs matrix
	@[ -d "$(OLD)" ] || { echo "compare two builds: OLD=$(OLD) is no folder; set it to the folder of another build's programs" >&2; exit 2; }
	$(CARGO_STATIC) build --locked --target $(TARGET) --bin differential
	$(DEV)/differential $(OLD) $(DEV) integration/differential-expected $(SPECS)

MUTANTS := 27.1.0
# Such as FILES='hooks/core/src/judge/verdict.rs'
FILES ?=

## changes in the code of core that neither its tests nor the guard's notice; fails on one that integration/mutants-expected does not list
mutants: setup
	@export PATH="$(TOOLS)/bin:$$PATH"; \
	  cargo mutants --version 2>/dev/null | grep -qF '$(MUTANTS)' || cargo install --quiet --locked --root $(TOOLS) --version $(MUTANTS) cargo-mutants; \
	  sh integration/mutants.sh $(CURDIR)/target/mutants $(FILES)

# per target, five targets
SECONDS ?= 120

## findings lie in target/fuzz/findings
fuzz: setup
	sh hooks/fuzz/run.sh $(SECONDS)

## many minutes: a thousand containers in one shim, five hundred execs, a hundred megabytes each way; ten thousand refreshes and
## updates, a thousand restarts, deletions and ends of a container in the middle of one, and two hundred creates under updates
soak: build matrix faults
	$(STORY) soak:: --ignored --nocapture
	BINDGUARD_SOAK=1 $(CARGO_TEST) -p bindguard-guard -p bindguard-agent --test it -- refresh:: refresh_files_hostile:: \
	  refresh_host_roots:: refresh_interrupted:: refresh_mounts_hostile:: refresh_namespaces:: kubelet_at_the_same_moment:: histories::
	BINDGUARD_SOAK=1 $(STORY) ten_thousand_updates:: updates_during_starts:: losses_of_the_race_by_program:: \
	  installer_killed_at_every_step:: every_syscall_fails_once:: demo_leaves_nothing_behind:: proof_of_generated_specs:: --nocapture

DRAW := python3 $(CURDIR)/integration/pictures/draw.py

## the pictures of the README and the pages: drawings, and terminals with the output of the real programs
pictures: programs matrix
	$(DRAW) drawings $(CURDIR)/docs
	BINDGUARD_PICTURE=$(CURDIR)/docs/commands.svg $(STORY) pictures_by_hand:: --ignored
	$(DEV)/demo > target/demo.txt
	$(DRAW) terminal --read --columns 150 $(CURDIR)/docs/demo.svg 'make demo' < target/demo.txt

REFRESH_APPS := $(CURDIR)/target/refresh-apps

# An S3 server whose buckets are folders
S3_SERVER := 0.12.0

## real programs that watch a file, after a live refresh: nginx, node, Java, Python, Go, tail; rclone, sshfs and s3fs that die; ten minutes
refresh-apps: build matrix
	sh integration/matrix/setup.sh rclone:rclone sshfs:sshfs s3fs:s3fs /usr/lib/openssh/sftp-server:openssh-sftp-server
	@$(TOOLS)/bin/s3s-fs --version 2>/dev/null | grep -qF '$(S3_SERVER)' || \
	  cargo install --quiet --locked --debug --root $(TOOLS) --version $(S3_SERVER) --features binary s3s-fs
	sh integration/refresh-apps/fetch.sh $(REFRESH_APPS)
	PATH="$(TOOLS)/bin:$$PATH" BINDGUARD_REFRESH_APPS=$(REFRESH_APPS) $(STORY) refresh_apps:: drivers_mount_volumes_anew:: --ignored --nocapture \
	  --test-threads 1

# A folder of Kubernetes source, 1.30 or newer, in place of Debian's 1.20.
KUBERNETES ?=

NEWEST_KUBELET := $(addprefix real_kubelet::,newest_containerd a_race_that_the_kubelet_has_on_the_newest_containerd \
  live_refresh_on_the_newest_containerd) real_kubelet_csi::a_driver_that_restarts_on_the_newest_containerd \
  $(addprefix real_kubelet_node::,a_node_that_restarts_on_the_newest_containerd three_hundred_creates_on_the_newest_containerd) \
  chart_on_a_cluster::newest_containerd

## real kubelets in the fake one's place, 1.20 with helm 3 and 1.37 with helm 4; builds them, half an hour; KUBERNETES=DIR builds one of your own source
kubelet: build matrix helm
	sh integration/matrix/setup.sh openssl:openssl /usr/lib/python3/dist-packages/h2:python3-h2
ifeq ($(KUBERNETES),)
	sh integration/cluster/fetch.sh $(CLUSTER)
	sh integration/cluster/network.sh $(CLUSTER)/network
	$(STORY) real_kubelet:: real_kubelet_csi:: chart_on_a_cluster:: --ignored --nocapture --test-threads 1 --skip newest_containerd
	sh integration/cluster/go.sh $(CLUSTER)-1.37
	sh integration/cluster/network.sh $(CLUSTER)-1.37/network
	sh integration/matrix/go.sh $(MATRIX) helm-4
	BINDGUARD_CLUSTER=$(CLUSTER)-1.37 BINDGUARD_HELM=$(MATRIX)/v/helm-4 $(STORY) $(NEWEST_KUBELET) --exact --ignored --nocapture --test-threads 1
else
	sh integration/cluster/build.sh $(CLUSTER)-own $(KUBERNETES)
	sh integration/cluster/network.sh $(CLUSTER)-own/network
	BINDGUARD_CLUSTER=$(CLUSTER)-own $(STORY) $(NEWEST_KUBELET) --exact --ignored --nocapture --test-threads 1
endif

SUITES := $(CURDIR)/target/suites

## critest and containerd's client integration suite, against the stock shim and bindguard on containerd 2.3 and 2.4; an hour; logs in target/suites
suites: build matrix
	sh integration/matrix/setup.sh ipcmk:util-linux openssl:openssl
	sh integration/matrix/go.sh $(MATRIX) cri-tools-1.37
	sh integration/suites/client.sh $(SUITES) containerd-2.4 containerd-2.3
	sh integration/cluster/network.sh $(SUITES)/network
	BINDGUARD_SUITES=$(SUITES) $(STORY) suites:: --ignored --nocapture --test-threads 1

# modules that run on other kernels, and on a node with systemd and cgroup v2 alone
SYSCALLS := mounts mount_ids mount_watch descriptors_of_mounts prove replace target enter enter_hostile refresh refresh_engine_mounts refresh_files \
  refresh_files_hostile refresh_hostile refresh_interrupted refresh_mounts refresh_nested_binds refresh_nested_hostile refresh_nfs \
  refresh_host_roots release_copies refresh_namespaces refresh_slow refresh_driver_volumes refresh_idmapped refresh_killed refresh_mounts_hostile \
  refresh_open_descriptors refresh_without_record admit \
  cached_paths hanging_probes program_of_container \
  attributes_of_the_mount cifs dead_kubelet_root dead_sources host_root_binds hostile_volumes \
  mounts_within_volumes nfs older_kernels payloads_of_drivers repairers_at_once silent_sources unreadable_paths vanished_directories \
  volumes_mounted_anew written_by_containers
SYSCALLS_9P := ninep
SYSCALLS_SELINUX := refresh_selinux refresh_mounts
STORIES := configmap_update_then_restart containerd_as_a_service cri_pods crun_killed_before_its_record limits_by_hand oom_event_before_exit \
  resources_of_a_running_pod shim_killed_in_create shim_killed_then_containerd_cleans_up stats_and_pause systemd_makes_the_scopes
TESTED_CRATES := -p bindguard-sys -p bindguard-guard -p bindguard-operator -p bindguard-integration

# Copies each test program of cargo's messages to a folder, under the last part of its crate's path.
keep_programs = sed -n 's,.*"package_id":"[^"\#]*/\([a-z]*\)\#.*"executable":"\([^"]*\)".*,\1 \2,p' \
  | { rm -rf $(1); mkdir -p $(1); while read -r crate program; do cp "$$program" $(1)/"$$crate" || exit 1; done; }

## the tests of bindguard-sys, bindguard-guard and bindguard-operator on other kernels, and stories on a node with systemd and cgroup v2 alone
kernels: build matrix
	sh integration/matrix/setup.sh qemu-system-x86_64:qemu-system-x86 cpio:cpio xz:xz-utils checkpolicy:checkpolicy
	sh integration/kernels/fetch.sh $(CURDIR)/target/kernels
	$(CARGO_TEST) $(TESTED_CRATES) --test it --no-run --message-format=json \
	  | $(call keep_programs,target/kernels/programs)
	sh integration/kernels/run.sh $(CURDIR)/target/kernels $(BIN) "$(SYSCALLS)" $(addprefix target/kernels/programs/,sys guard operator)
	sh integration/kernels/run-9p.sh $(CURDIR)/target/kernels "$(SYSCALLS_9P)" target/kernels/programs/guard
	sh integration/kernels/run-selinux.sh $(CURDIR)/target/kernels "$(SYSCALLS_SELINUX)" target/kernels/programs/guard
	sh integration/kernels/run-node.sh $(CURDIR)/target/kernels $(MATRIX) $(BIN) "$(STORIES)" target/kernels/programs/integration

ARM64 := $(CURDIR)/target/arm64
ARM64_BIN := $(ARM64)/cargo/aarch64-unknown-linux-gnu/release
ARM64_TESTS := mounts replace target admit attributes_of_the_mount host_root_binds mounts_within_volumes payloads_of_drivers \
  vanished_directories volumes_mounted_anew written_by_containers agent_with_the_stock_shim configmap_update_then_restart \
  container_life_cycle host_root_propagation

## the programs for arm64, and the guard's tests and four stories on an emulated arm64 machine; half an hour
arm64: setup
	sh integration/matrix/setup.sh debootstrap:debootstrap qemu-system-aarch64:qemu-system-arm cpio:cpio xz:xz-utils
	sh integration/arm64/build.sh $(ARM64) build --release $(PROGRAMS)
	sh integration/arm64/build.sh $(ARM64) build --release $(SHIM)
	sh integration/arm64/build.sh $(ARM64) build --release $(AGENT)
	sh integration/arm64/build.sh $(ARM64) test -p bindguard-sys -p bindguard-guard -p bindguard-integration \
	  --test it --no-run --message-format=json | $(call keep_programs,$(ARM64)/programs)
	sh integration/arm64/fetch.sh $(ARM64)
	sh integration/arm64/run.sh $(ARM64) $(ARM64_BIN) "$(ARM64_TESTS)" $(ARM64)/programs/*

# containerd's own shim in Rust, as its crate is published
PEER := 0.2.0

## the other shims are in the matrix
peer: setup
	@$(TOOLS)/bin/containerd-shim-runc-v2-rs -v 2>/dev/null | grep -qF 'Version: $(PEER)' || \
	  cargo install --quiet --locked --root $(TOOLS) --version $(PEER) containerd-runc-shim

## two of it are the floor of a shim's `start`
floor:
	mkdir -p $(TOOLS)/bin
	rustc --edition 2024 -C opt-level=s -C strip=symbols $(STATIC) -o $(TOOLS)/bin/empty-program integration/bench/floor/empty_program.rs

bench: build matrix peer floor
	$(STORY) agent_budgets:: refresh_budgets:: volume_refresh_budgets:: slow_containers_delay_no_other:: --ignored --nocapture --test-threads 1
	cargo run --quiet --locked -p bindguard-bench --bin bench

clean:
	cargo clean
