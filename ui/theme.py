"""Colours, type and spacing of the page, as a Gradio theme: light and dark come from its variables."""

from __future__ import annotations

import gradio as gr

# Fonts of the machine itself: nothing is fetched, and text looks at home.
TEXT_FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"]
CODE_FONT = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]

ACCENT = gr.themes.Color(
    name="tide",
    c50="#effaf8", c100="#d5f2ec", c200="#aae4d9", c300="#73cfc1", c400="#41b3a4", c500="#219687",
    c600="#15796e", c700="#14615a", c800="#144e49", c900="#15413d", c950="#052624",
)  # fmt: skip
STONE = gr.themes.Color(
    name="ink",
    c50="#fafafa", c100="#f4f4f5", c200="#e6e7e9", c300="#d1d3d7", c400="#9b9fa8", c500="#6c717c",
    c600="#4f545f", c700="#393d47", c800="#24272e", c900="#181a1f", c950="#101216",
)  # fmt: skip


def build_theme() -> gr.themes.Base:
    """Dense and calm: small text, thin lines, one accent."""
    theme = gr.themes.Base(
        primary_hue=ACCENT,
        secondary_hue=ACCENT,
        neutral_hue=STONE,
        text_size="sm",
        spacing_size="sm",
        radius_size="sm",
        font=TEXT_FONT,
        font_mono=CODE_FONT,
    )
    return theme.set(
        body_background_fill="#ffffff",
        body_background_fill_dark="*neutral_950",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary="*neutral_50",
        background_fill_secondary_dark="*neutral_900",
        body_text_color="*neutral_900",
        body_text_color_dark="#e8e9ec",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        border_color_primary="*neutral_200",
        border_color_primary_dark="*neutral_800",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_shadow="none",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_400",
        input_background_fill="#ffffff",
        input_background_fill_dark="*neutral_800",
        input_border_color="*neutral_200",
        input_border_color_dark="*neutral_700",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="#ffffff",
        slider_color="*primary_600",
        slider_color_dark="*primary_500",
    )
