//! containerd as a service of systemd with `KillMode=process`, as its own unit has it: systemd
//! restarts containerd, also after a crash, and ends neither a shim nor a container. A container
//! that ends meanwhile is reported afterwards.

use bindguard_integration::footprint::parent_of;
use bindguard_integration::on_every_generation_with_systemd;
use bindguard_integration::prelude::*;
use bindguard_integration::systemd::Service;

on_every_generation_with_systemd!(|setup: Setup| setup.story(story));

fn story(node: &Node) -> Result<()> {
    let before = Leftovers::of(node)?;
    node.without_containerd(Signal::SIGTERM, || {
        let service = Service::start(node)?;
        for runtime in [Runtime::Bindguard, Runtime::Wrapper] {
            lives_through_restarts(node, &service, runtime)
                .with_context(|| format!("{runtime:?}"))?;
        }
        service.stop()
    })?;
    before.are_all(node)
}

fn lives_through_restarts(node: &Node, service: &Service, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("web").runtime(runtime).start()?.success()?;
    let init = ctr.pid("web")?;
    let shim = parent_of(init)?;
    let group =
        fs::read_to_string(format!("/proc/{shim}/cgroup")).context("read the shim's cgroup")?;
    ensure!(
        group.trim_end().ends_with(service.name()),
        "the shim is not in the service: {group}"
    );

    service.restart()?;
    is_unharmed(node, init)?;
    service.crash()?;
    is_unharmed(node, init)?;
    // containerd 1.7 and newer forget a task of the stock shim that ended while they were away.
    if runtime == Runtime::Bindguard {
        ends_without_containerd(node, service, shim, init)?;
    }
    ctr.remove("web")
}

fn ends_without_containerd(node: &Node, service: &Service, shim: u32, init: u32) -> Result<()> {
    service.stop()?;
    ensure!(
        fs::exists(format!("/proc/{shim}"))?,
        "the shim ended with the service"
    );
    kill(Pid::from_raw(init.try_into()?), Signal::SIGKILL).context("kill the container's init")?;
    until("the init has ended", || {
        Ok(!fs::exists(format!("/proc/{init}/exe"))?)
    })?;
    service.restart()?;
    node.ctr().wait_for_status("web", "STOPPED")
}

fn is_unharmed(node: &Node, init: u32) -> Result<()> {
    let ctr = node.ctr();
    ensure!(ctr.pid("web")? == init, "the container was started again");
    ensure!(
        ctr.exec("web", &["true"])?.code() == 0,
        "nothing can be executed in it"
    );
    Ok(())
}
