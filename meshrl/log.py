"""Log lines of the program. A rank that says nothing does not pay for structlog: it is imported with the first."""


def info(event: str, **values: object) -> None:
    """Say what goes on."""
    import structlog  # noqa: PLC0415 -- with rich and attrs it is a fifth of what meshrl imports

    structlog.get_logger().info(event, **values)


def warning(event: str, **values: object) -> None:
    """Say what somebody should look at."""
    import structlog  # noqa: PLC0415 -- as above

    structlog.get_logger().warning(event, **values)
