"""A service beside training jobs as one page: one cluster against two, and its GPUs over time."""

import cordee
from cordee.simulate.services.answer import TogetherAnswer
from cordee.simulate.services.rows import result_rows
from cordee.units import format_micro_usd
from cordee.view.chart import Axis, ChartLine, chart_html
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

HOUR_S = 3600


def together_page(answer: TogetherAnswer) -> str:
    """Return the page, self-contained."""
    facts = [
        (f"{answer.one.serving.requests:,}", f"requests to {answer.model}"),
        (f"{answer.one.serving.attained:.2%}", f"within {answer.slo}"),
        (f"{answer.one.training.useful_gpu_hours:,.0f}", f"useful GPU-hours of {answer.jobs}"),
        (format_micro_usd(answer.one.micro_usd), f"for {answer.one.gpus:,} GPUs"),
    ]
    sentences = [each[0].upper() + each[1:] + "." for each in (answer.summary, answer.saving) if each]
    footer = f"Written by cordee {cordee.__version__} with `cordee simulate --requests`."
    sections = [_table(answer), *([_chart(answer)] if len(answer.samples) > 1 else [])]
    return report_html(HtmlReport("Serving and training on one cluster", " ".join(sentences), sections, facts, footer))


def _table(answer: TogetherAnswer) -> Section:
    columns = [("one cluster", answer.one), ("two clusters", answer.two)]
    columns += [("two that do as well", answer.enough)] if answer.enough is not None else []
    rows = [[name, *("" if show is None else show(result) for _, result in columns)] for name, show in result_rows()]
    lead = (
        "In one cluster replicas come and go as the scaling policy decides, and training jobs make room for them. "
        "Of two clusters, the first has a fixed number of replicas."
    )
    notes = [f"price: {source}" for source in answer.price_sources]
    return Section("Side by side", lead, (table_html(["", *(name for name, _ in columns)], rows),), notes=notes)


def _chart(answer: TogetherAnswer) -> Section:
    serving = [(each.at_s / HOUR_S, float(each.serving)) for each in answer.samples]
    training = [(each.at_s / HOUR_S, float(each.training)) for each in answer.samples]
    rates = [(each.at_s / HOUR_S, each.requests_per_s) for each in answer.samples]
    hour = Axis("hour", lambda value: f"{value:g}")
    gpus = Axis("GPUs held", lambda value: f"{value:,.0f}")
    lines = [ChartLine("serving", serving, steps=True), ChartLine("training", training, steps=True)]
    load = Axis("requests a second", lambda value: f"{value:,.0f}")
    figures = (
        chart_html(lines, hour, gpus, label="GPUs of serving and of training over time"),
        chart_html([ChartLine("requests", rates)], hour, load, label="requests a second over time"),
    )
    return Section("The one cluster over time", "GPUs held, and the load of the service.", figures)
