#!/usr/bin/env python3
"""Draws docs/idea.svg, the picture of the README. Run it anywhere: python3 docs/idea.py"""

import pathlib

WIDTH, HEIGHT = 760, 300
BOX, LINE, TEXT, MUTED, DISK, MEMORY, DEVICE = "#ffffff", "#57606a", "#1f2328", "#57606a", "#fff1e5", "#ddf4ff", "#dafbe1"
parts = []


def box(x, y, width, height, fill, title, *lines):
    parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}"/>')
    parts.append(f'<text x="{x + width / 2}" y="{y + 24}" class="t">{title}</text>')
    for number, line in enumerate(lines):
        parts.append(f'<text x="{x + width / 2}" y="{y + 46 + 18 * number}" class="l">{line}</text>')


def arrow(x1, y1, x2, y2, label, above=True):
    parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#a)"/>')
    parts.append(f'<text x="{(x1 + x2) / 2}" y="{(y1 + y2) / 2 + (-7 if above else 17)}" class="m">{label}</text>')


box(20, 60, 170, 180, DISK, "SSD", "features: 100s of GB", "adjacency", "packed rows, plans", "checkpoints")
box(295, 20, 190, 110, MEMORY, "RAM, inside --memory", "sample ahead, so that", "the future is known:", "cache what comes next")
box(295, 170, 190, 90, MEMORY, "prefetched batches", "assembled while", "the last one trains")
box(590, 90, 150, 110, DEVICE, "CPU or GPU", "forward, backward,", "step: never waits", "for the disk")
arrow(190, 90, 293, 75, "adjacency")
arrow(190, 215, 293, 215, "rows, read once")
arrow(390, 130, 390, 168, "")
parts.append('<text x="400" y="155" class="m" style="text-anchor:start">placements</text>')
arrow(485, 205, 588, 165, "upload")
arrow(590, 110, 487, 75, "")
parts.append('<text x="540" y="82" class="m">feedback</text>')

svg = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Features and adjacency stay on the SSD; batches are sampled ahead, so the best rows are cached and batches are ready before the device asks.">
<style>text{{font-family:sans-serif;text-anchor:middle}}.t{{font-size:15px;font-weight:600;fill:{TEXT}}}.l{{font-size:13px;fill:{TEXT}}}.m{{font-size:12px;fill:{MUTED}}}</style>
<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
{chr(10).join(parts)}
</svg>
"""
pathlib.Path(__file__).with_suffix(".svg").write_text(svg)
