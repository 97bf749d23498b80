"""HTTP/1.1 on asyncio: values, a server, a client. Knows neither models nor what is asked for."""
