"""Changes of jobs and nodes from the pages, each after a page that says what will happen."""

from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from cordee.answers.jobs import JobDetailView
from cordee.answers.nodes import NodeView
from cordee.control.chains import ChainOperations
from cordee.control.roles import Action
from cordee.control.web.frame import HEADERS, PageRoute, framed
from cordee.control.web.login import Form
from cordee.control.web.others import node_of
from cordee.control.web.routes import AskedPages, Visitor
from cordee.errors import InputError
from cordee.ids import JobId
from cordee.units import plural
from cordee.view.page import part

router = APIRouter(route_class=PageRoute, include_in_schema=False)
_JOB = {"stop": "Stop it", "requeue": "Requeue it", "pause": "Pause it", "resume": "Resume it"}
_NODE = {"cordon": "Cordon it", "drain": "Drain it", "uncordon": "Put it back into use"}


@router.get("/jobs/{ref}/{verb}")
def ask_job(ref: str, verb: str, pages: AskedPages, visit: Visitor) -> Response:
    """Say what will happen to a job, and ask for consent."""
    title = _known(_JOB, verb)
    found = pages.operations.job(visit.viewer.job(ref, Action.CHANGE, f"{verb} it"))
    if verb == "requeue" and found.state == "running":
        title = "Give its GPUs to others"
    facts = _consequences(found, verb)
    html = part("consent", found, verb, title, facts, visit.form, template="web/job.html.j2")
    return framed(found.name, {"consent": html}, lead=found.job_id, person=visit.viewer.name, form=visit.form)


@router.post("/jobs/{ref}/{verb}")
def change_job(ref: str, verb: str, pages: AskedPages, visit: Visitor, form: Form) -> Response:
    """Stop, requeue, pause or resume a job."""
    _known(_JOB, verb)
    operations, by = pages.operations, visit.viewer.name
    found = operations.job(visit.viewer.job(ref, Action.CHANGE, f"{verb} it"))
    operates = visit.viewer.operates_queue_of(JobId(found.job_id))
    chains = ChainOperations(operations)
    orders: dict[str, Callable[[], object]] = {
        "stop": lambda: operations.stop(found.job_id, by=by, now=form.get("now") == "1"),
        "requeue": lambda: chains.requeue(found.job_id, by=by),
        "pause": lambda: chains.hold(found.job_id, by=by, leave=True),
        "resume": lambda: chains.resume(found.job_id, by=by, operates=operates),
    }
    orders[verb]()
    return RedirectResponse(f"/jobs/{found.job_id}?done={verb}", status_code=303, headers=HEADERS)


@router.get("/nodes/{name}/{verb}")
def ask_node(name: str, verb: str, pages: AskedPages, visit: Visitor) -> Response:
    """Say what will happen to a node, and ask for consent."""
    title = _known(_NODE, verb)
    visit.viewer.check(Action.CHANGE, "take nodes out of use")
    node = node_of(pages.operations, name)
    html = part("consent", node, verb, title, _of_node(node, verb), visit.form, template="web/nodes.html.j2")
    return framed(node.name, {"consent": html}, here="Nodes", person=visit.viewer.name, form=visit.form)


@router.post("/nodes/{name}/{verb}")
def change_node(name: str, verb: str, pages: AskedPages, visit: Visitor, form: Form) -> Response:
    """Cordon, drain or uncordon a node."""
    _known(_NODE, verb)
    visit.viewer.check(Action.CHANGE, "take nodes out of use")
    operations, by, why = pages.operations, visit.viewer.name, form.get("why", "")[:1000]
    node = node_of(operations, name)
    if verb == "uncordon":
        operations.uncordon(node.name, by=by, why=why)
    else:
        operations.cordon(node.name, by=by, why=why, drain=verb == "drain")
    return RedirectResponse(f"/nodes?done={verb}", status_code=303, headers=HEADERS)


def _known(verbs: dict[str, str], verb: str) -> str:
    if verb not in verbs:
        raise InputError(f"{verb[:40]!r} is not one of {', '.join(verbs)}")
    return verbs[verb]


def _consequences(job: JobDetailView, verb: str) -> list[str]:
    """Return what a request about a job will do, in sentences."""
    runs = job.state in ("running", "stopping")
    facts = [f"It {'holds' if runs else 'asks for'} {plural(job.gpus, 'GPU')}, and is {job.state}."]
    saves = (job.spec.get("checkpoint") or {}).get("to") is not None
    if runs and verb in ("stop", "requeue", "pause"):
        facts.append(
            "It gets notice and leaves with a checkpoint."
            if saves
            else "It writes no checkpoint: what it has done is lost, and it would begin again at step 0."
        )
        if job.step is not None:
            at = "none" if job.checkpoint_step is None else f"at step {job.checkpoint_step:,}"
            facts.append(f"It is at step {job.step:,}; its newest checkpoint: {at}.")
    after = {
        "stop": "It will not run again unless it is requeued.",
        "requeue": f"{'As if it were preempted, it' if runs else 'It'} goes to the end of its queue, and starts again "
        "when its turn comes.",
        "pause": "It holds no GPU until it is resumed.",
        "resume": "It waits in its queue from now on.",
    }
    return [*facts, after[verb]]


def _of_node(node: NodeView, verb: str) -> list[str]:
    jobs = sorted({holder.rpartition(".")[0] for holder in node.used.values()})
    held = f"{plural(len(node.used), 'GPU')} of {node.gpus} held by {', '.join(jobs[:8]) or 'nobody'}."
    words = {
        "cordon": "Nothing new starts on it; what runs goes on.",
        "drain": "Nothing new starts on it, and its attempts get notice: they save and leave.",
        "uncordon": "Jobs may start on it again.",
    }
    return [held, words[verb]]
