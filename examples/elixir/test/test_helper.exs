ExUnit.start(capture_log: true, timeout: 180_000)
