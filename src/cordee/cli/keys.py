"""`cordee serve keys`: keys of the gateways, and the tenants that they belong to."""

import math
from typing import Annotated, Any

import typer

from cordee.answers.services import KeyView, TenantView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import InputError
from cordee.units import MICRO_USD, format_micro_usd

keys = typer.Typer(no_args_is_help=True, add_completion=False)

Tenant = Annotated[
    str, typer.Argument(metavar="TENANT", help="Name of the tenant, whose usage is counted and limited.")
]


@keys.command("create", epilog="Example: cordee serve keys create acme --name ci --model chat")
def create(
    tenant: Tenant,
    *,
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="The key is good for this model only; may be repeated.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a key of a tenant, and print it: it is shown this once."""
    with terminal.connect(home) as client:
        made = client.create_key(tenant, name=name, models=model or [])
    if as_json:
        terminal.print_json(made)
        return
    print(made.secret)
    note = f"{made.id} of {tenant}, shown this once; to make it void: cordee serve keys revoke {made.id}"
    terminal.stderr().print(note, highlight=False, markup=False)


@keys.command("list")
def list_keys(
    *,
    revoked: Annotated[bool, typer.Option("--revoked", help="List revoked keys as well.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List tenants with their limits, and their keys without the secrets."""
    with terminal.connect(home) as client:
        listed, tenants = client.keys(), client.tenants()
    shown = [key for key in listed if revoked or key.revoked_us is None]
    if as_json:
        terminal.print_json({"tenants": tenants, "keys": shown})
        return
    if not listed:
        print("there is no key: anybody who reaches a gateway may use it")
    if not tenants:
        return
    console = terminal.stdout()
    heads = ("WEIGHT", "PRIORITY", "RATE", "BUDGET", "SPENT")
    table = terminal.table("TENANT", *heads, right=heads, folds=("TENANT",))
    for tenant in tenants:
        table.add_row(tenant.name, *_limits(tenant))
    console.print(table)
    table = terminal.table("KEY", "TENANT", "NAME", "MODELS", "CREATED", folds=("TENANT", "NAME", "MODELS"))
    for key in shown:
        table.add_row(key.id, key.tenant, key.name or "–", ", ".join(key.models) or "all", _age(key))
    console.print(table)


@keys.command("revoke", epilog="Example: cordee serve keys revoke key-0123456789ab")
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, or its name.")],
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a key void: gateways refuse it within seconds, and requests that are open go on."""
    with terminal.connect(home) as client:
        seen = client.revoke_key(key)
    if as_json:
        terminal.print_json(seen)
    else:
        print(f"{seen.id} of {seen.tenant} is void")


@keys.command("tenant", epilog="Example: cordee serve keys tenant acme --weight 3 --budget 500 --per month")
def tenant(
    name: Tenant,
    *,
    weight: Annotated[float | None, typer.Option(help="Its fair share, against the other tenants' weights.")] = None,
    priority: Annotated[int | None, typer.Option(help="Requests of a higher one go first.")] = None,
    rate: Annotated[str | None, typer.Option(help="Requests a second, at most: 2.5, or none.")] = None,
    budget: Annotated[str | None, typer.Option(help="Dollars, at most: 500, $12.50, or none.")] = None,
    per: Annotated[str | None, typer.Option(help="Period of the budget: day or month of UTC.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Add a tenant, or change its weight, priority and limits; those not given stay as they are."""
    given: dict[str, Any] = {"weight": weight, "priority": priority, "per": per}
    changes = {key: value for key, value in given.items() if value is not None}
    if rate is not None:
        changes["rate_per_s"] = _number(rate, "--rate")
    if budget is not None:
        dollars = _number(budget.removeprefix("$"), "--budget")
        changes["budget_micro_usd"] = None if dollars is None else round(dollars * MICRO_USD)
    with terminal.connect(home) as client:
        known = {each.name: each for each in client.tenants()}
        rules = known[name].model_dump(exclude={"name", "spent_micro_usd"}) if name in known else {}
        seen = client.set_tenant(name, **rules | changes)
    if as_json:
        terminal.print_json(seen)
    else:
        titles = ("weight", "priority", "rate", "budget", "spent")
        print(f"{name}: " + ", ".join(f"{title} {text}" for title, text in zip(titles, _limits(seen), strict=True)))


def _number(text: str, option: str) -> float | None:
    """Return a positive number; None for `none`."""
    if text == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{option} {text!r} is not a number", hint="write a number, or none")
    return number


def _limits(tenant: TenantView) -> tuple[str, str, str, str, str]:
    rate = "none" if tenant.rate_per_s is None else f"{tenant.rate_per_s:g}/s"
    budget = tenant.budget_micro_usd
    money = "none" if budget is None else f"{format_micro_usd(budget)} a {tenant.per}"
    return f"{tenant.weight:g}", str(tenant.priority), rate, money, format_micro_usd(tenant.spent_micro_usd)


def _age(key: KeyView) -> str:
    if key.revoked_us is not None:
        return f"revoked {terminal.since(key.revoked_us)} ago"
    return f"{terminal.since(key.created_us)} ago by {key.by}"
