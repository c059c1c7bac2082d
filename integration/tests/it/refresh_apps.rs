//! `make refresh-apps`: real programs notice a live refresh, or do not, as the table in
//! docs/refresh.md says.
//!
//! Each program runs in separate pods, a pod for each notification. The program prints the content
//! that it reads at an event; nginx serves the content.

use bindguard_integration::prelude::*;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use k8s_cri::v1::Mount;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// The longest time after which a program has noticed: polling programs look once a second.
const NOTICED: Duration = Duration::from_secs(5);

/// A program without a handler ends by a signal.
const NOTIFICATIONS: [&str; 3] = ["none", "touch", "signal:SIGHUP"];

/// A program, as docs/refresh.md names it.
struct Program {
    name: &'static str,
    words: &'static [&'static str],
}

/// The new content, or the words of coreutils' tail: it prints no content of a new file before that
/// file grows.
const PRINTED: [&str; 2] = ["two", "has been replaced"];

const JAVA: &str = "/usr/lib/jvm/java-17-openjdk-amd64/bin/java";

const PROGRAMS: [Program; 9] = [
    Program {
        name: "busybox `tail -F`",
        words: &["/bin/busybox", "tail", "-n", "1", "-F", "/etc/app/app.conf"],
    },
    Program {
        name: "node `fs.watchFile`",
        words: &["/usr/bin/node", "/apps/watch.js", "poll"],
    },
    Program {
        name: "node `fs.watch` of the file",
        words: &["/usr/bin/node", "/apps/watch.js", "file"],
    },
    Program {
        name: "Go fsnotify of the file",
        words: &["/apps/watch-go", "/etc/app/app.conf"],
    },
    Program {
        name: "coreutils `tail -F`",
        words: &["/usr/bin/tail", "-n", "1", "-F", "/etc/app/app.conf"],
    },
    Program {
        name: "node `fs.watch` of the folder",
        words: &["/usr/bin/node", "/apps/watch.js", "folder"],
    },
    Program {
        name: "Go fsnotify of the folder",
        words: &["/apps/watch-go", "/etc/app"],
    },
    Program {
        name: "Java `WatchService`",
        words: &[JAVA, "-Xmx32m", "-cp", "/apps", "Watch"],
    },
    Program {
        name: "Python watchdog",
        words: &["/usr/bin/python3.11", "/apps/watch.py"],
    },
];

const NGINX: &[&str] = &["/usr/sbin/nginx", "-c", "/etc/app/app.conf"];

/// Runs a program in the root filesystem of the programs, and passes the signal on. The init itself
/// keeps the container's root.
const IN_ITS_ROOT: &str = "trap 'kill -HUP $program' HUP; busybox chroot /root \"$@\" & program=$!; \
                           while kill -0 $program 2>/dev/null; do wait $program; done";

/// The content of the file: a configuration for nginx.
fn content(text: &str) -> String {
    format!(
        "daemon off; pid /tmp/nginx.pid; error_log stderr; events {{}} http {{ access_log off; \
         client_body_temp_path /tmp/body; server {{ listen unix:/tmp/nginx.sock; location / {{ return 200 {text}; }} }} }}\n"
    )
}

#[test]
#[ignore = "needs a root filesystem with the programs: make refresh-apps"]
fn programs_notice_as_documented() {
    Setup::on(Generation::NEWEST).cri().story(story);
}

fn story(node: &Node) -> Result<()> {
    let apps = std::env::var_os("BINDGUARD_REFRESH_APPS")
        .context("set BINDGUARD_REFRESH_APPS: make refresh-apps")?;
    let scene = Scene {
        node,
        cri: node.cri()?,
        apps: PathBuf::from(apps).join("root"),
    };
    let _agent = Agent::start(node, "")?;
    let mut lines = Vec::new();
    for program in &PROGRAMS {
        let prints = |app: &str| {
            Ok(PRINTED
                .iter()
                .any(|text| scene.cri.logs(app).is_ok_and(|log| log.contains(text))))
        };
        let noticed = |notify: &&str| scene.run(program.words, notify, &prints);
        lines.push(line(
            program.name,
            &NOTIFICATIONS[..2]
                .iter()
                .map(noticed)
                .collect::<Result<Vec<_>>>()?,
        ));
    }
    let noticed = |notify: &&str| {
        scene.run(NGINX, notify, &|app| {
            Ok(scene.served_by_nginx(app)? == "two")
        })
    };
    lines.push(line(
        "nginx",
        &NOTIFICATIONS
            .iter()
            .map(noticed)
            .collect::<Result<Vec<_>>>()?,
    ));
    lines.iter().for_each(|line| eprintln!("{line}"));
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/refresh.md");
    let page = fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
    let missing: Vec<_> = lines.iter().filter(|line| !page.contains(*line)).collect();
    ensure!(
        missing.is_empty(),
        "docs/refresh.md has other lines than these: {missing:#?}"
    );
    Ok(())
}

/// A line of the table in docs/refresh.md: alone, with a touch, with a signal.
fn line(name: &str, noticed: &[bool]) -> String {
    let word = |noticed: Option<&bool>| match noticed {
        Some(true) => "yes",
        Some(false) => "no",
        None => "",
    };
    let [alone, touch, signal] = [0, 1, 2].map(|index| word(noticed.get(index)));
    format!("| {name} | {alone} | {touch} | {signal} |").replace("|  |", "| |")
}

struct Scene<'n> {
    node: &'n Node,
    cri: Cri,
    apps: PathBuf,
}

impl Scene<'_> {
    /// Runs a program, changes its file, and returns if it noticed.
    fn run(
        &self,
        words: &[&str],
        notify: &str,
        has_noticed: &dyn Fn(&str) -> Result<bool>,
    ) -> Result<bool> {
        let pod = self.node.kubelet().pod("uid-app")?;
        let volume = pod.volume(
            VolumeKind::ConfigMap,
            "conf",
            &[("app.conf", &content("one"))],
        )?;
        let annotations = [
            ("bindguard.io/refresh", "true"),
            ("bindguard.io/refresh-notify", notify),
        ];
        let sandbox = self
            .cri
            .run_annotated_pod("runc", "app", pod.uid(), &annotations)?;
        let words = [&["sh", "-c", IN_ITS_ROOT, "sh"], words].concat();
        let app = self
            .cri
            .start_container(&sandbox, "app", &words, &self.mounts(&volume)?)?;
        let pid = self.cri.pid(&app)?;
        // Programs print a line when they watch; nginx serves, and tail prints the first content.
        until("the program runs", || {
            Ok(!self.cri.logs(&app)?.is_empty() || self.served_by_nginx(&app).is_ok())
        })?;
        ensure!(
            Path::new(&format!("/proc/{pid}")).exists(),
            "{words:?} ended: {}",
            self.cri.logs(&app)?
        );
        thread::sleep(Duration::from_secs(1));
        volume.update(&[("app.conf", &content("two"))])?;
        let file = format!("/proc/{pid}/root/root/etc/app/app.conf");
        until("the file is new", || {
            Ok(fs::read_to_string(&file)?.contains("two"))
        })?;
        let start = Instant::now();
        let mut noticed = has_noticed(&app)?;
        while !noticed && start.elapsed() < NOTICED {
            thread::sleep(Duration::from_millis(50));
            noticed = has_noticed(&app)?;
        }
        self.end(&sandbox)?;
        Ok(noticed)
    }

    fn mounts(&self, volume: &Volume) -> Result<Vec<Mount>> {
        let subpath = volume.subpath("app", 0, "app.conf").bind()?.to_owned();
        let binds = [
            (self.apps.as_path(), "/root"),
            (Path::new("/proc"), "/root/proc"),
            (Path::new("/dev"), "/root/dev"),
        ];
        let mut mounts: Vec<_> = binds
            .map(|(source, place)| mount(source, place, PropagationPrivate))
            .into();
        mounts.push(mount(
            &subpath,
            "/root/etc/app/app.conf",
            PropagationPrivate,
        ));
        Ok(mounts)
    }

    fn served_by_nginx(&self, app: &str) -> Result<String> {
        let mut stream = UnixStream::connect(format!(
            "/proc/{}/root/root/tmp/nginx.sock",
            self.cri.pid(app)?
        ))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.rsplit("\r\n").next().unwrap_or_default().to_owned())
    }

    fn end(&self, sandbox: &Sandbox) -> Result<()> {
        self.cri.remove_pod(sandbox)?;
        let _ = fs::remove_file(self.apps.join("tmp/nginx.sock"));
        until("the kubelet deletes the pod", || {
            Ok(self.node.kubelet().pod("uid-app")?.delete().is_ok())
        })
    }
}
