"""`cairn webhooks`: receivers of events, and the deliveries to them."""

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command.options import UrlOption, console, errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.command.secret_files import SecretFileOption, secret_file
from cairn.service.schemas import Delivery, DeliveryList, DeliveryState, EventKind, WebhookList

webhooks_app: Final = typer.Typer(
    help="Manage webhooks, which send events of checkpoints to a URL.", no_args_is_help=True
)

SHOWN: Final = 50
"""Default number of deliveries to list."""

WebhookArgument = Annotated[
    str, typer.Argument(metavar="WEBHOOK", help="Its id, from `cairn webhooks list`.")
]
DeliveryArgument = Annotated[
    int, typer.Argument(metavar="N", help="Its number, from `cairn webhooks deliveries`.")
]


@webhooks_app.command()
def create(
    address: Annotated[str, typer.Argument(metavar="URL", help="Where events are sent.")],
    kind: Annotated[
        list[EventKind] | None,
        typer.Option(metavar="KIND", help="Tell of this only; may be repeated."),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Tell of this root only; may be repeated."),
    ] = None,
    runs: Annotated[
        str, typer.Option(metavar="PATTERN", help="Tell of runs with such a name.")
    ] = "*",
    output: SecretFileOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Create a webhook, and print its secret.

    The secret signs the messages. It cannot be shown again.
    """
    # The file first: if it cannot be created, no webhook is made whose secret is lost.
    with secret_file(output) as file, Client(url) as client:
        created = client.create_webhook(address, kinds=kind or None, roots=root or None, runs=runs)
        if file is not None:
            file.write(f"{created.secret}\n")
    if json:
        print_document(created if output is None else created.details)
        return
    place = f" It is saved in {output}."
    if output is None:
        print(created.secret)
        place = " It won't be shown again."
    errors.print(f"Signing secret of webhook {created.details.id}.{place}", soft_wrap=True)


@webhooks_app.command("list")
def list_webhooks(url: UrlOption = None, json: JsonOption = False) -> None:
    """List the webhooks, with numbers of undelivered events.

    An event is pending until it is delivered, or dead once its last try has failed.
    """
    with Client(url) as client:
        listed = client.webhooks()
    if json:
        print_document(WebhookList(webhooks=listed))
        return
    titles = ("webhook", "url", "kinds", "roots", "runs", "pending", "dead", "created (UTC)")
    rows = (
        (
            webhook.id,
            webhook.url,
            _listed(webhook.kinds),
            _listed(webhook.roots),
            webhook.runs,
            webhook.pending,
            webhook.dead,
            webhook.created,
        )
        for webhook in listed
    )
    print_table(console, titles, rows)


@webhooks_app.command()
def delete(webhook: WebhookArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Delete a webhook; undelivered events are dropped."""
    with Client(url) as client:
        client.delete_webhook(webhook)
        left = client.webhooks()
    if json:
        print_document(WebhookList(webhooks=left))
        return
    print(f"webhook {webhook} deleted")


@webhooks_app.command("test")
def send_test(webhook: WebhookArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Send a test event to a webhook."""
    with Client(url) as client:
        _print_delivery(client.test_webhook(webhook), json=json)


@webhooks_app.command()
def deliveries(
    webhook: WebhookArgument,
    state: Annotated[
        DeliveryState | None, typer.Option(help="Only those in this state; default: all.")
    ] = None,
    most: Annotated[
        int, typer.Option(metavar="N", min=1, help="The newest, at most so many.")
    ] = SHOWN,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the deliveries of a webhook, newest first."""
    with Client(url) as client:
        listed = [*islice(client.deliveries(webhook, state=state), most)]
    if json:
        print_document(DeliveryList(deliveries=listed))
        return
    _print_deliveries(listed)


@webhooks_app.command()
def redeliver(
    webhook: WebhookArgument,
    delivery: DeliveryArgument,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Send an event again, even a delivered one.

    Later events of its run wait for it.
    """
    with Client(url) as client:
        _print_delivery(client.redeliver(webhook, delivery), json=json)


def _print_delivery(delivery: Delivery, *, json: bool) -> None:
    if json:
        print_document(delivery)
    else:
        _print_deliveries([delivery])


def _print_deliveries(deliveries: Iterable[Delivery]) -> None:
    titles = ("n", "event", "run", "at (UTC)", "state", "tries", "status", "seconds", "problem")
    rows = (
        (
            delivery.id,
            delivery.event.kind,
            "/".join(filter(None, (delivery.event.root, delivery.event.run))),
            delivery.event.at,
            delivery.state.value,
            delivery.attempts,
            delivery.tries[-1].status if delivery.tries else None,
            f"{delivery.tries[-1].seconds:g}" if delivery.tries else None,
            delivery.tries[-1].error if delivery.tries else None,
        )
        for delivery in deliveries
    )
    print_table(console, titles, rows)


def _listed(names: list[str] | None) -> str:
    return "all" if names is None else ", ".join(names)
