"""The real server: how it is started, asked, judged, and what is released afterwards."""
