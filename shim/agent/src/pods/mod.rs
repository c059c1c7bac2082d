//! The pods of this node from the CRI: all pods for a survey, and pods that requested refreshes.
//!
//! Threads send a question, the main thread's tokio answers: a runtime that hangs costs a thread
//! its time limit, and the agent nothing.

mod cri;
mod inits;
mod listing;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::identity::PodName;
use bindguard_core::refresh_request::{OptIn, RefreshRequest, RequestedBinds};
use bindguard_operator::cri::{Cri, CriError};
use bindguard_operator::pods::Pods as PodsOfNode;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;

use self::inits::Inits;
use self::listing::Listing;

pub use self::cri::{client, client_in, pod};

use crate::container::Container;

/// Time limit of a question, which is several queries.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// The time for which a pod without a request is not queried again: its annotations are fixed, but
/// a sandbox of the same uid can be created again.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The time for which a listing of all pods is kept after the last question.
const LISTING_KEPT: Duration = Duration::from_secs(1);

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

impl Pod {
    fn request(&self) -> RefreshRequest {
        RefreshRequest::from_annotations(|name| self.annotations.get(name).map(String::as_str))
    }
}

/// A pod that requested refreshes, and the containers to refresh.
#[derive(Debug, Clone)]
pub struct OptedIn {
    /// The pod.
    pub pod: Pod,
    /// Its request.
    pub request: RefreshRequest,
    /// Its running containers: all containers if the request is for binds besides subPaths, else
    /// the named containers.
    pub containers: Vec<Container>,
}

type Answer = Result<Option<OptedIn>, CriError>;

/// The pods that requested refreshes of binds besides subPaths, by uid.
pub type PodsWithBinds = HashMap<String, RequestedBinds>;

/// Finds pods, from any thread.
#[derive(Debug, Clone)]
pub struct PodLookup {
    questions: UnboundedSender<Question>,
}

/// A question to the CRI, and the way back.
#[derive(Debug)]
enum Question {
    OptedIn {
        uid: String,
        update: Instant,
        others_wait: bool,
        reply: Sender<Answer>,
    },
    All(Sender<Result<PodsOfNode, CriError>>),
    WithBinds(Sender<Result<PodsWithBinds, CriError>>),
    Writable {
        uid: String,
        reply: Sender<Result<Vec<PathBuf>, CriError>>,
    },
    Name {
        uid: String,
        reply: Sender<Result<Option<Pod>, CriError>>,
    },
}

impl PodLookup {
    /// A lookup that no CRI answers.
    #[cfg(test)]
    pub fn unanswered() -> Self {
        Self {
            questions: unbounded_channel().0,
        }
    }

    /// All pods with their containers. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn all(&self) -> Result<PodsOfNode, CriError> {
        self.query(Question::All)
    }

    /// The pods that requested refreshes of binds besides subPaths. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn with_binds(&self) -> Result<PodsWithBinds, CriError> {
        self.query(Question::WithBinds)
    }

    /// The pod with this uid, if it requested refreshes, with its containers at the moment of an
    /// update or later. If `others_wait`, one listing of all pods answers the next questions as
    /// well. Waits.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn opted_in(&self, uid: &str, update: Instant, others_wait: bool) -> Answer {
        self.query(|reply| Question::OptedIn {
            uid: uid.to_owned(),
            update,
            others_wait,
            reply,
        })
    }

    /// The sources of all writable mounts of a pod's containers, including ended containers. Waits,
    /// and delays no other question.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn writable_mounts(&self, uid: &str) -> Result<Vec<PathBuf>, CriError> {
        self.query(|reply| Question::Writable {
            uid: uid.to_owned(),
            reply,
        })
    }

    /// The names of the pod with this uid; `None` if the pod has no sandbox. Waits, and delays no
    /// other question.
    ///
    /// # Errors
    /// If the CRI does not answer.
    pub fn names(&self, uid: &str) -> Result<Option<PodName>, CriError> {
        let pod = self.query(|reply| Question::Name {
            uid: uid.to_owned(),
            reply,
        })?;
        Ok(pod.map(|pod| PodName {
            namespace: Some(pod.namespace),
            name: Some(pod.name),
            uid: Some(uid.to_owned()),
        }))
    }

    fn query<A>(
        &self,
        question: impl FnOnce(Sender<Result<A, CriError>>) -> Question,
    ) -> Result<A, CriError> {
        let (reply, answer) = channel();
        self.questions
            .send(question(reply))
            .map_err(|_| CriError::Silent)?;
        answer
            .recv_timeout(LIST_TIMEOUT)
            .map_err(|_| CriError::Silent)?
    }
}

/// Answers in the main thread.
#[derive(Debug)]
pub struct Answering {
    cri: Cri,
    mode: RefreshMode,
    questions: UnboundedReceiver<Question>,
    without_request: HashMap<String, Instant>,
    listing: Option<Listing>,
    inits: Inits,
}

/// The sender of questions to this CRI, and the task that answers the questions.
pub fn pods(cri: Cri, mode: RefreshMode) -> (PodLookup, Answering) {
    let (ask, questions) = unbounded_channel();
    let (without_request, listing, inits) = Default::default();
    (
        PodLookup { questions: ask },
        Answering {
            cri,
            mode,
            questions,
            without_request,
            listing,
            inits,
        },
    )
}

impl Answering {
    /// Answers until no thread can send a question any more.
    pub async fn run(mut self) {
        while let Some(question) = self.next().await {
            // A thread that did not wait any longer needs no answer.
            match question {
                Question::OptedIn {
                    uid,
                    update,
                    others_wait,
                    reply,
                } => {
                    drop(reply.send(self.answer(&uid, update, others_wait).await));
                }
                Question::All(reply) => drop(reply.send(self.all().await)),
                Question::WithBinds(reply) => drop(reply.send(self.with_binds().await)),
                Question::Writable { uid, reply } => {
                    let cri = self.cri.clone();
                    tokio::spawn(async move { drop(reply.send(cri.writable_mounts(&uid).await)) });
                }
                Question::Name { uid, reply } => self.answer_apart(uid, reply),
            }
        }
    }

    /// The next question. The listing of many pods is dropped when none comes.
    async fn next(&mut self) -> Option<Question> {
        if self.listing.is_some() {
            match timeout(LISTING_KEPT, self.questions.recv()).await {
                Ok(question) => return question,
                Err(_) => self.listing = None,
            }
        }
        self.questions.recv().await
    }

    /// Looks a pod up in a task of its own. A pod is never renamed, so an old listing has the right
    /// names.
    fn answer_apart(&self, uid: String, reply: Sender<Result<Option<Pod>, CriError>>) {
        if let Some(pod) = self.listing.as_ref().and_then(|listing| listing.pod(&uid)) {
            drop(reply.send(Ok(Some(pod.clone()))));
            return;
        }
        let cri = self.cri.clone();
        tokio::spawn(async move { drop(reply.send(pod(&cri, &uid).await)) });
    }

    async fn all(&mut self) -> Result<PodsOfNode, CriError> {
        let mut pods = self.cri.pods().await?;
        self.inits
            .forget_others(|id| pods.containers.iter().any(|container| container.id == id));
        if self.mode == RefreshMode::All {
            pods.opt_all_in();
        }
        Ok(pods)
    }

    async fn with_binds(&self) -> Result<PodsWithBinds, CriError> {
        let pods = cri::running_pods(&self.cri).await?.into_iter();
        let requested = pods.map(|(uid, pod)| (uid, pod.request().binds));
        Ok(requested.filter(|(_, binds)| binds.any()).collect())
    }

    async fn answer(&mut self, uid: &str, update: Instant, others_wait: bool) -> Answer {
        let now = Instant::now();
        self.without_request.retain(|_, until| *until > now);
        if self.without_request.contains_key(uid) {
            return Ok(None);
        }
        if others_wait {
            self.list(update).await?;
        }
        let listing = self
            .listing
            .as_ref()
            .filter(|listing| listing.is_enough_for(update));
        let pod = match listing {
            Some(listing) => listing.pod(uid).cloned(),
            None => pod(&self.cri, uid).await?,
        };
        let Some(pod) = pod else { return Ok(None) };
        let mut request = pod.request();
        if self.mode == RefreshMode::All {
            request.containers = OptIn::All;
        }
        if request.is_none() {
            self.without_request
                .insert(uid.to_owned(), now + REMEMBERED);
            return Ok(None);
        }
        let mut named = match listing {
            Some(listing) => listing.containers(&pod.sandbox).to_vec(),
            None => cri::containers(&self.cri, &pod.sandbox).await?,
        };
        named.retain(|named| request.binds.any() || request.containers.includes(&named.name));
        let containers = self.inits.add(&self.cri, named).await?;
        Ok(Some(OptedIn {
            pod,
            request,
            containers,
        }))
    }

    /// Lists all pods, unless the last listing is of after this update.
    async fn list(&mut self, update: Instant) -> Result<(), CriError> {
        let is_enough = self
            .listing
            .as_ref()
            .is_some_and(|listing| listing.is_enough_for(update));
        if !is_enough {
            let listing = cri::listing(&self.cri).await?;
            self.inits.forget_others(|id| listing.is_running(id));
            self.listing = Some(listing);
        }
        Ok(())
    }
}
