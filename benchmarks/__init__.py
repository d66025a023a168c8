"""Every number the README shows is measured by a script here."""
