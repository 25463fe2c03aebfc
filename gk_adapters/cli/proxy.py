"""`gk proxy`: the read-mode proxy in front of prefill and decode servers."""

from __future__ import annotations

import click

from gk_core.errors import MissingDependencyError

__all__ = ["proxy"]


@click.command()
@click.option("--prefill", "prefill_urls", multiple=True, required=True, metavar="URL", help="May be given often.")
@click.option("--decode", "decode_urls", multiple=True, required=True, metavar="URL", help="May be given often.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8192, show_default=True)
def proxy(prefill_urls: tuple[str, ...], decode_urls: tuple[str, ...], host: str, port: int) -> None:
    """Serve OpenAI completions and chat over prefill and decode servers, taken in turn."""
    try:
        import uvicorn

        from gk_adapters.proxy import ProxySettings, build_proxy
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{error.name} is not installed: pip install 'gk-decode[proxy]'") from error
    settings = ProxySettings(
        prefill_urls=tuple(u.rstrip("/") for u in prefill_urls), decode_urls=tuple(u.rstrip("/") for u in decode_urls)
    )
    uvicorn.run(build_proxy(settings), host=host, port=port, log_level="warning")
