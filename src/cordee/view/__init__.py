"""Rows and events in; terminal tables, SVG and HTML out. Pure: nothing here asks for the time or touches a file."""
