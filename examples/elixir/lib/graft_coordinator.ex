defmodule Graft.TrainingCoordinator do
  @moduledoc """
  The daily cycle, driven from Elixir: starts a run under a supervisor, follows it, remembers its state.

      {:ok, _} = Graft.TrainingCoordinator.start_link(project: "/srv/helpdesk")
      Graft.TrainingCoordinator.run()          # or every day: `every_ms: 24 * 3_600_000`
      Graft.TrainingCoordinator.status()
      #=> %{state: :running, phase: "training", done: 120.0, total: 900.0, checkpoint: 110, restarts: 0, ...}

  The supervisor restarts a killed or stopped worker, at most `:max_restarts` times in `:max_seconds`; then the
  state is `:gave_up`. What a restart repeats is the part after the last checkpoint.
  """

  use GenServer

  def start_link(options) do
    GenServer.start_link(__MODULE__, options, name: Keyword.get(options, :name, __MODULE__))
  end

  @doc "Start a run; `{:error, :already_running}` if one is under way."
  def run(coordinator \\ __MODULE__), do: GenServer.call(coordinator, :run)

  @doc "The state of the last run."
  def status(coordinator \\ __MODULE__), do: GenServer.call(coordinator, :status)

  @doc "Stop the run at its next checkpoint."
  def cancel(coordinator \\ __MODULE__), do: GenServer.call(coordinator, :cancel)

  @impl true
  def init(options) do
    Process.flag(:trap_exit, true)
    if every = options[:every_ms], do: :timer.send_interval(every, :due)
    {:ok, %{options: options, supervisor: nil, worker: nil, run: idle()}}
  end

  @impl true
  def handle_call(:run, _from, %{supervisor: nil} = state), do: {:reply, :ok, start(state)}
  def handle_call(:run, _from, state), do: {:reply, {:error, :already_running}, state}
  def handle_call(:status, _from, state), do: {:reply, state.run, state}

  def handle_call(:cancel, _from, %{worker: nil} = state),
    do: {:reply, {:error, :not_running}, state}

  def handle_call(:cancel, _from, state) do
    Graft.Worker.cancel(state.worker)
    {:reply, :ok, state}
  end

  @impl true
  def handle_info(:due, %{supervisor: nil} = state), do: {:noreply, start(state)}
  def handle_info(:due, state), do: {:noreply, state}

  def handle_info({:graft, worker, message}, state) do
    state = if worker == state.worker, do: state, else: adopt(state, worker)
    Graft.Worker.ack(worker, message["seq"])
    {:noreply, %{state | run: note(state.run, message)}}
  end

  # A worker that ended normally, or for good: the run is over. Otherwise the supervisor starts the next one.
  # This comes after the worker's messages; a monitor that is set up late would not know the reason.
  def handle_info({:graft_ended, worker, reason}, %{worker: known} = state)
      when state.supervisor != nil and known in [worker, nil] do
    case reason do
      :normal ->
        {:noreply, finish(state, if(state.run.state == :stopped, do: :stopped, else: :done))}

      {:shutdown, {:failed, message}} ->
        {:noreply, finish(fail(state, message), :failed)}

      _ ->
        {:noreply, %{state | worker: nil}}
    end
  end

  # The supervisor itself gave up: too many restarts.
  def handle_info({:EXIT, supervisor, _}, %{supervisor: supervisor} = state) do
    {:noreply, %{state | supervisor: nil, worker: nil, run: %{state.run | state: :gave_up}}}
  end

  def handle_info(_, state), do: {:noreply, state}

  defp start(state) do
    options = Keyword.put(state.options, :subscriber, self()) |> Keyword.delete(:name)
    state = %{state | run: %{idle() | state: :running}}

    started =
      Supervisor.start_link([{Graft.Worker, options}],
        strategy: :one_for_one,
        max_restarts: Keyword.get(options, :max_restarts, 5),
        max_seconds: Keyword.get(options, :max_seconds, 600)
      )

    case started do
      {:ok, supervisor} ->
        %{state | supervisor: supervisor}

      {:error, {:shutdown, {:failed_to_start_child, _, {:shutdown, {:failed, message}}}}} ->
        state = fail(state, message)
        %{state | run: %{state.run | state: :failed}}
    end
  end

  defp fail(state, message), do: %{state | run: %{state.run | error: state.run.error || message}}

  defp adopt(state, worker) do
    again = if state.run.workers > 0, do: 1, else: 0
    run = %{state.run | workers: state.run.workers + 1, restarts: state.run.restarts + again}
    %{state | worker: worker, run: run}
  end

  defp finish(state, outcome) do
    Supervisor.stop(state.supervisor)
    %{state | supervisor: nil, worker: nil, run: %{state.run | state: outcome}}
  end

  defp idle do
    %{state: :idle, phase: "", done: 0, total: 0, checkpoint: nil, workers: 0, restarts: 0}
    |> Map.merge(%{pid: nil, result: nil, error: nil, messages: 0})
  end

  defp note(run, message) do
    run = %{run | messages: run.messages + 1}

    case message do
      %{"type" => "hello"} ->
        %{run | pid: message["pid"]}

      %{"type" => "progress"} ->
        %{run | phase: message["phase"], done: message["done"], total: message["total"]}

      %{"type" => "checkpoint"} ->
        %{run | checkpoint: message["step"]}

      %{"type" => "done"} ->
        %{run | result: message["result"]}

      %{"type" => "stopped"} ->
        %{run | state: :stopped}

      %{"type" => "error"} ->
        %{run | error: message}

      _ ->
        run
    end
  end
end
