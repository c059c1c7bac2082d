//! The pods of this node, as the CRI knows them: all of them for a survey, and those that requested refreshes.
//!
//! Threads send a question, the main thread's tokio answers: a runtime that hangs costs a thread its time limit, and the agent nothing.

mod cri;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::refresh_request::{OptIn, RefreshRequest};
use bindguard_operator::pods::Pods as PodsOfNode;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub use self::cri::{Cri, CriError};

use crate::refresher::Container;

/// Time limit of one question, which is several queries.
const PATIENCE: Duration = Duration::from_secs(10);

/// The time for which a pod without a request is not queried again: its annotations are fixed, but a sandbox of the same
/// uid can be created again.
const REMEMBERED: Duration = Duration::from_secs(60);

/// A pod.
#[derive(Debug, Clone)]
pub struct Pod {
    /// The id of its sandbox.
    pub sandbox: String,
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// The annotations that it had when the sandbox was made.
    pub annotations: BTreeMap<String, String>,
}

/// A pod that requested refreshes, and the containers that they are for.
#[derive(Debug, Clone)]
pub struct OptedIn {
    /// The pod.
    pub pod: Pod,
    /// Its request.
    pub request: RefreshRequest,
    /// Its running containers, as far as the request names them.
    pub containers: Vec<Container>,
}

type Answer = Result<Option<OptedIn>, CriError>;

/// Finds pods, from any thread.
#[derive(Debug, Clone)]
pub struct PodLookup {
    questions: UnboundedSender<Question>,
}

/// A question to the CRI, and the way back.
#[derive(Debug)]
enum Question {
    OptedIn(String, Sender<Answer>),
    All(Sender<Result<PodsOfNode, CriError>>),
}

impl PodLookup {
    /// All pods with their containers. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn all(&self) -> Result<PodsOfNode, CriError> {
        self.query(Question::All)
    }

    /// The pod with this uid, if it requested refreshes. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn opted_in(&self, uid: &str) -> Answer {
        self.query(|reply| Question::OptedIn(uid.to_owned(), reply))
    }

    fn query<A>(&self, question: impl FnOnce(Sender<Result<A, CriError>>) -> Question) -> Result<A, CriError> {
        let (reply, answer) = channel();
        self.questions.send(question(reply)).map_err(|_| CriError::Silent)?;
        answer.recv_timeout(PATIENCE).map_err(|_| CriError::Silent)?
    }
}

/// Answers in the main thread.
#[derive(Debug)]
pub struct Answering {
    cri: Cri,
    mode: RefreshMode,
    questions: UnboundedReceiver<Question>,
    without_request: HashMap<String, Instant>,
}

/// Both ends of the questions to the CRI at this socket.
pub fn pods(socket: &Path, mode: RefreshMode) -> (PodLookup, Answering) {
    let (ask, questions) = unbounded_channel();
    (PodLookup { questions: ask }, Answering { cri: Cri::of(socket), mode, questions, without_request: HashMap::new() })
}

impl Answering {
    /// Answers until no thread can send a question any more.
    pub async fn run(mut self) {
        while let Some(question) = self.questions.recv().await {
            // A thread that did not wait any longer needs no answer.
            match question {
                Question::OptedIn(uid, reply) => drop(reply.send(self.answer(&uid).await)),
                Question::All(reply) => drop(reply.send(self.all().await)),
            }
        }
    }

    async fn all(&self) -> Result<PodsOfNode, CriError> {
        let mut pods = self.cri.pods_of_node().await?;
        if self.mode == RefreshMode::All {
            pods.opt_all_in();
        }
        Ok(pods)
    }

    async fn answer(&mut self, uid: &str) -> Answer {
        let now = Instant::now();
        self.without_request.retain(|_, until| *until > now);
        if self.without_request.contains_key(uid) {
            return Ok(None);
        }
        let Some(pod) = self.cri.pod(uid).await? else { return Ok(None) };
        let mut request = RefreshRequest::from_annotations(|name| pod.annotations.get(name).map(String::as_str));
        if self.mode == RefreshMode::All {
            request.containers = OptIn::All;
        }
        if request.containers == OptIn::None {
            self.without_request.insert(uid.to_owned(), now + REMEMBERED);
            return Ok(None);
        }
        let mut containers = self.cri.containers(&pod.sandbox).await?;
        containers.retain(|container| request.containers.includes(&container.name));
        Ok(Some(OptedIn { pod, request, containers }))
    }
}
