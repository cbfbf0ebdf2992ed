"""Pictures of how arrays are cut: text for a terminal, SVG and HTML for a page.

No picture moves, reads or shows data, and none needs devices.
"""
