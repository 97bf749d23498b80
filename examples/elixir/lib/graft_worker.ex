defmodule Graft.Worker do
  @moduledoc """
  One training run behind a port: `graft worker --stdio --packet 4`.

  Start it under a supervisor. It ends as follows, and `restart: :transient` does the rest:

    * done (exit code 0, or the gate's 10, 11, 12): `:normal`, no restart;
    * stopped at a checkpoint (75), killed, or silent: an abnormal reason, so the supervisor starts it
      again, and the run goes on from its last checkpoint;
    * a mistake or a refusal (1, 2, 3): `{:shutdown, {:failed, message}}`, no restart.

  The subscriber gets `{:graft, pid, message}` for every message, and calls `ack/2` when it has taken one.
  A subscriber that is slow gets fewer progress messages; the run never waits for it. After the last message
  it gets `{:graft_ended, pid, reason}`.

  When this process ends, for whatever reason, the port is closed and the run stops at a checkpoint.
  """

  use GenServer, restart: :transient

  @version 1
  @finished [0, 10, 11, 12]

  @doc """
  Options: `:project` (required), `:subscriber` (a pid or a name, default the caller), `:command` (`"train"`,
  `"run"`, `"cycle"`), `:model`, `:graft` (the words of the command, default `["graft"]`), `:window`,
  `:heartbeat_seconds`, `:silence_ms`, `:framing` (`:packet4` or `:lines`), `:name`.
  """
  def start_link(options) do
    options = Keyword.put_new(options, :subscriber, self())
    GenServer.start_link(__MODULE__, options, Keyword.take(options, [:name]))
  end

  @doc "Confirm that messages up to this number were taken."
  def ack(worker, seq), do: GenServer.cast(worker, {:ack, seq})

  @doc "Ask the run to stop at its next checkpoint."
  def cancel(worker, reason \\ ""), do: GenServer.cast(worker, {:cancel, reason})

  @impl true
  def init(options) do
    # So that `terminate/2` runs when the supervisor stops this process.
    Process.flag(:trap_exit, true)
    [program | words] = Keyword.get(options, :graft, ["graft"])

    case System.find_executable(program) do
      nil ->
        {:stop, {:shutdown, {:failed, %{"what" => "#{program} is not installed"}}}}

      path ->
        framing = Keyword.get(options, :framing, :packet4)
        port = open(path, words, framing)
        silence = Keyword.get(options, :silence_ms, 60_000)
        state = %{port: port, options: options, framing: framing, silence: silence}
        state = Map.merge(state, %{last: %{}, canceled: false, rest: ""})
        send_message(state, start_message(options))
        {:ok, state, silence}
    end
  end

  @impl true
  def handle_cast({:ack, seq}, state), do: reply(state, %{type: "ack", seq: seq})

  def handle_cast({:cancel, reason}, state) do
    reply(%{state | canceled: true}, %{type: "cancel", reason: reason})
  end

  @impl true
  def handle_info({port, {:data, {:noeol, piece}}}, %{port: port} = state) do
    {:noreply, %{state | rest: state.rest <> piece}, state.silence}
  end

  def handle_info({port, {:data, {:eol, piece}}}, %{port: port} = state) do
    take(state.rest <> piece, %{state | rest: ""})
  end

  def handle_info({port, {:data, text}}, %{port: port} = state), do: take(text, state)

  def handle_info({port, {:exit_status, code}}, %{port: port} = state) do
    {:stop, reason(code, state), %{state | port: nil}}
  end

  # No message and no heartbeat for so long: the other side hangs.
  def handle_info(:timeout, state) do
    kill(state.port)
    {:stop, :silent, state}
  end

  # A write to a worker that has just ended closes the port before its exit status comes: then its last
  # message says how it ended.
  def handle_info({:EXIT, port, _}, %{port: port} = state) do
    code = state.last["exit_code"]
    reason = if code == nil, do: :port_closed, else: reason(code, state)
    {:stop, reason, %{state | port: nil}}
  end

  def handle_info(_, state), do: {:noreply, state, state.silence}

  # The end of its input is the request to stop in order.
  @impl true
  def terminate(reason, state) do
    if state.port != nil and Port.info(state.port) != nil, do: Port.close(state.port)
    tell(state, {:graft_ended, self(), reason})
  end

  defp open(path, words, framing) do
    frame = if framing == :packet4, do: {:packet, 4}, else: {:line, 1_048_576}
    more = if framing == :packet4, do: ["--packet", "4"], else: []
    args = words ++ ["worker", "--stdio"] ++ more
    Port.open({:spawn_executable, path}, [:binary, :exit_status, frame, args: args])
  end

  defp start_message(options) do
    %{
      type: "start",
      v: @version,
      project: Path.expand(Keyword.fetch!(options, :project)),
      command: Keyword.get(options, :command, "train"),
      model: Keyword.get(options, :model),
      window: Keyword.get(options, :window, 64),
      heartbeat_seconds: Keyword.get(options, :heartbeat_seconds, 5)
    }
  end

  defp take(text, state) do
    case Graft.JSON.decode(text) do
      {:ok, %{"type" => "hello", "v" => version}} when version != @version ->
        message = %{"what" => "the worker speaks version #{version} of the protocol"}
        {:stop, {:shutdown, {:failed, message}}, state}

      {:ok, message} ->
        tell(state, {:graft, self(), message})
        {:noreply, %{state | last: message}, state.silence}

      :error ->
        {:stop, {:bad_message, text}, state}
    end
  end

  defp reason(code, _) when code in @finished, do: :normal
  defp reason(75, %{canceled: true}), do: :normal
  defp reason(75, _), do: :stopped_at_a_checkpoint
  defp reason(code, state) when code in [1, 2, 3], do: {:shutdown, {:failed, state.last}}
  defp reason(code, _), do: {:killed, code}

  defp tell(state, message) do
    send(state.options[:subscriber], message)
    :ok
  rescue
    # A name that is not registered now: the run goes on.
    ArgumentError -> :ok
  end

  defp reply(state, message) do
    send_message(state, message)
    {:noreply, state, state.silence}
  end

  defp send_message(%{port: port, framing: framing}, message) do
    text = Graft.JSON.encode(message)
    Port.command(port, if(framing == :packet4, do: text, else: text <> "\n"))
  rescue
    # The other side has ended; its exit status is on the way.
    ArgumentError -> false
  end

  defp kill(port) do
    with {:os_pid, pid} <- Port.info(port, :os_pid), do: System.cmd("kill", ["-9", "#{pid}"])
  end
end
