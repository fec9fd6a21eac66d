"""The page: Gradio Blocks as the frame; session list, conversation, panel and Debug tab are drawn by its own scripts.

Three columns rather than two `gr.Sidebar`s: those share one width, and lie over the page on a phone. Nothing here holds
state on the server (`gr.State` would cost every tab a connection for life): the open chat is in the URL.
"""

from __future__ import annotations

import gradio as gr
from fastapi import FastAPI
from starlette.routing import Mount

from engine.config import KV_FORMATS
from engine.sampling.params import SamplingParams
from ui.api.errors import install_error_handlers
from ui.chat import ChatService
from ui.page_routes import add_page_routes, static_path
from ui.theme import build_theme


def build_page(chat: ChatService) -> gr.Blocks:
    """The frame. What fills it comes from `GET /api/sessions/{id}/live`."""
    with gr.Blocks(title="KVScope", analytics_enabled=False, fill_width=True) as page, gr.Row(elem_id="kv-app"):
        with gr.Column(elem_id="kv-left", min_width=0):
            _sessions()
        with gr.Column(elem_id="kv-main", min_width=0):
            _conversation()
        with gr.Column(elem_id="kv-right", min_width=0):
            _side()
    return page


def mount(api: FastAPI, chat: ChatService) -> FastAPI:
    """Declare the page's routes and put Gradio at "/". Call it after all other routes are declared."""
    add_page_routes(api, chat)
    page = build_page(chat)
    page.queue(api_open=False)
    app = gr.mount_gradio_app(
        api,
        page,
        path="/",
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        show_error=False,
        max_file_size="1kb",
        theme=build_theme(),
        head=_head(),
    )
    # Gradio's own routes are an app of their own, whose errors would look otherwise.
    for route in app.routes:
        if isinstance(route, Mount) and isinstance(route.app, FastAPI):
            install_error_handlers(route.app)
    return app


def _head() -> str:
    base = static_path()
    styles = "".join(
        f'<link rel="stylesheet" href="{base}/{name}.css">'
        for name in ("frame", "chat", "panel", "debug", "timeline", "code")
    )
    return (
        f'{styles}<script type="module" src="{base}/main.js"></script>'
        '<link rel="icon" href="data:image/svg+xml,'
        "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' rx='4' "
        "fill='%2315796e'/%3E%3Cpath d='M4 4v8M4 9l4-5M5.5 7.5 9 12M10 12h2.500' stroke='white' stroke-width='1.6' "
        "fill='none' stroke-linecap='round'/%3E%3C/svg%3E\">"
    )


def _drawn(name: str, elem_id: str) -> gr.HTML:
    """A region that the script `name` fills; it may load before or after the region is there."""
    return gr.HTML(
        html_template="<div></div>",
        js_on_load=f"(window.kvscopeRegions ||= []).push(['{name}', element])",
        apply_default_css=False,
        elem_id=elem_id,
    )


def _sessions() -> None:
    _drawn("brand", "kv-brand")
    new = gr.Button("New chat", elem_id="kv-new", size="sm")
    new.click(None, None, None, js="() => window.kvscope.newChat()")
    gr.Textbox(
        placeholder="Search chats", show_label=False, container=False, elem_id="kv-search", max_lines=1, type="text"
    )
    _drawn("sessions", "kv-sessions")


def _conversation() -> None:
    _drawn("header", "kv-header")
    _drawn("chat", "kv-chat")
    with gr.Column(elem_id="kv-composer", min_width=0):
        gr.Textbox(placeholder="Message", show_label=False, container=False, lines=1, max_lines=10, elem_id="kv-prompt")
        with gr.Row(elem_id="kv-composer-bar"):
            _drawn("preview", "kv-preview")
            stop = gr.Button("Stop", elem_id="kv-stop", size="sm", min_width=0)
            send = gr.Button("Send", elem_id="kv-send", size="sm", min_width=0, variant="primary")
    send.click(None, None, None, js="() => window.kvscope.send()")
    stop.click(None, None, None, js="() => window.kvscope.stop()")


def _side() -> None:
    with gr.Tabs(elem_id="kv-tabs"):
        with gr.Tab("Cache", elem_id="kv-tab-cache"):
            _drawn("panel", "kv-panel")
        with gr.Tab("Settings", elem_id="kv-tab-settings"):
            _settings()
        with gr.Tab("Debug", elem_id="kv-tab-debug"):
            _drawn("debug", "kv-debug")


SLIDERS = (
    ("temperature", "Temperature", 0, 2, 0.05, "0 always takes the likeliest token"),
    ("top_k", "Top-k", 0, 200, 1, "0 is off"),
    ("top_p", "Top-p", 0, 1, 0.01, "1 is off"),
    ("min_p", "Min-p", 0, 1, 0.01, "0 is off"),
    ("repetition_penalty", "Repetition penalty", 0.5, 2, 0.01, "1 is off"),
    ("presence_penalty", "Presence penalty", -2, 2, 0.05, "0 is off"),
    ("frequency_penalty", "Frequency penalty", -2, 2, 0.05, "0 is off"),
)

KV_CHOICES = [("as the engine keeps it", ""), *((name, name) for name in KV_FORMATS[1:])]


def _settings() -> None:
    """The controls, in the order of `view_models.SETTINGS` after the system prompt. Kept per chat by the page."""
    defaults = SamplingParams()
    with gr.Column(elem_id="kv-settings", min_width=0):
        hint = "What the model should know or be in this chat"
        controls: list[gr.Textbox | gr.Slider | gr.Dropdown | gr.Checkbox] = [
            gr.Textbox(label="System prompt", lines=4, max_lines=14, placeholder=hint, elem_id="kv-system_prompt")
        ]
        for name, label, low, high, step, info in SLIDERS:
            value = getattr(defaults, name)
            controls.append(gr.Slider(low, high, value, step=step, label=label, info=info, elem_id=f"kv-{name}"))
        controls += [
            gr.Textbox(label="Max new tokens", placeholder="as many as fit", max_lines=1, elem_id="kv-max_tokens"),
            gr.Textbox(label="Seed", placeholder="a fresh one for each reply", max_lines=1, elem_id="kv-seed"),
            gr.Textbox(
                label="Stop strings", placeholder="one per line", lines=2, max_lines=6, elem_id="kv-stop_strings"
            ),
            gr.Dropdown(
                KV_CHOICES,
                value="",
                label="KV cache format",
                info="Another one computes the chat anew",
                elem_id="kv-kv_format",
            ),
            gr.Checkbox(
                label="Leave out earlier thoughts",
                info="What replies wrote in <think> marks is not sent again",
                elem_id="kv-strip_thoughts",
            ),
        ]
        _drawn("frozen", "kv-frozen")
        _drawn("template", "kv-template")
        _drawn("settings", "kv-settings-state")
    for control in controls:
        # `change` also reports what the page itself put in, which it recognises; `input` misses pasted text.
        control.change(None, controls, None, js="(...values) => window.kvscope.settingsChanged(values)")
    # The page's script puts a chat's settings into the controls by pressing this.
    fill = gr.Button(visible="hidden", elem_id="kv-fill-settings")
    fill.click(None, None, controls, js="() => window.kvscope.settingsValues()")
