"""What a finished run is reported as: fixed lines for people and scripts, and a JSON document."""
