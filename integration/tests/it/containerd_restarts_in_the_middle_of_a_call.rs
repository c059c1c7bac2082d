//! containerd is SIGKILLed while the shim creates, starts, executes, pauses or deletes for it, and
//! comes back: what the call made is there for the next client, or is gone without a trace.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::Gate;

/// For a client to notice that its containerd is gone.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// A call's verb at the runtime, and the client's arguments; empty to create a container.
type Call = (&'static str, &'static [&'static str]);

const CREATE: Call = ("create", &[]);
const START: Call = ("start", &[]);
const EXEC: Call = ("exec", &["task", "exec", "--exec-id", "e", "web", "true"]);
const PAUSE: Call = ("pause", &["task", "pause", "web"]);
const DELETE: Call = ("delete", &["task", "rm", "--force", "web"]);

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            [CREATE, START, EXEC, PAUSE, DELETE]
                .into_iter()
                .try_for_each(|call| {
                    in_the_middle(node, call, When::Before)?;
                    in_the_middle(node, call, When::After)
                })
        });
}

mod older {
    use super::*;

    #[test]
    fn containerd_1_7() {
        on_older(Generation::V1_7);
    }

    #[test]
    fn containerd_2_1() {
        on_older(Generation::V2_1);
    }
}

fn on_older(generation: Generation) {
    Setup::on(generation).obedient_runtime().story(|node| {
        in_the_middle(node, CREATE, When::Before)?;
        in_the_middle(node, EXEC, When::After)?;
        in_the_middle(node, DELETE, When::Before)
    });
}

/// The point in the call at which containerd is killed: before the runtime begins, or after its
/// work and before the shim learns of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Before,
    After,
}

fn in_the_middle(node: &Node, call: Call, when: When) -> Result<()> {
    let said = || format!("{when:?} the runtime's {}", call.0);
    let before = Leftovers::of(node)?;
    restart(node, call, when).with_context(said)?;
    before.are_all(node).with_context(said)
}

fn restart(node: &Node, (verb, words): Call, when: When) -> Result<()> {
    let (ctr, gate) = (node.ctr(), Gate::of(&node.programs()));
    if !words.is_empty() {
        ctr.container("web").start()?.success()?;
    }
    match when {
        When::Before => gate.close_before(verb)?,
        When::After => gate.close_after(verb)?,
    }
    let mut client = if words.is_empty() {
        ctr.container("web").command(&["--detach", "--null-io"])
    } else {
        ctr.command(words)
    };
    let mut client: Child = client
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("start the client")?;
    gate.wait_for_call()?;
    node.restart_containerd(Signal::SIGKILL)?;
    // the client ends because its containerd is gone, or requests a clean-up from the new
    // containerd, which waits for the call
    let begin = Instant::now();
    while client.try_wait().context("look at the client")?.is_none()
        && begin.elapsed() < CLIENT_TIMEOUT
    {
        thread::sleep(Duration::from_millis(10));
    }
    gate.open()?;
    until("the client has ended", || {
        Ok(client.try_wait().context("wait for the client")?.is_some())
    })?;
    // the name is free in the end, whichever process must release it
    let mut words = String::new();
    let free = until("it can be started again", || {
        for words in [
            &["task", "resume"][..],
            &["task", "rm", "--force"],
            &["container", "rm"],
        ] {
            let _ = run(ctr.command(&[words, &["web"]].concat()))?;
        }
        let again = ctr.container("web").runs(&["sh", "-c", "exit 7"]).run()?;
        words = again.stderr.clone();
        Ok(again.code() == 7)
    });
    free.with_context(|| format!("{words}{:?}", ctr.tasks()))
}

/// A restarted containerd lists the processes of each container within five seconds. It would treat a
/// container without processes as leaked, and remove it.
#[test]
fn a_runtime_that_is_slow_then_loses_no_container() {
    Setup::on(Generation::V2_1)
        .obedient_runtime()
        .story(|node| {
            let (ctr, gate) = (node.ctr(), Gate::of(&node.programs()));
            ctr.container("web").start()?.success()?;
            gate.close_before("ps")?;
            node.restart_containerd(Signal::SIGKILL)?;
            gate.wait_for_call()?;
            gate.open()?;
            ctr.wait_for_status("web", "RUNNING")?;
            ctr.end_task("web")?;
            ctr.forget("web")
        });
}
