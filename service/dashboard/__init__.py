"""Dashboard: pages rendered on the server. They read and change state only through the actions."""
