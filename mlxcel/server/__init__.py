"""The HTTP server (docs/spec/clients.md 3): `app.create_app` makes it. Importing this package imports nothing."""
