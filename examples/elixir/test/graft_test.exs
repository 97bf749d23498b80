defmodule GraftTest do
  use ExUnit.Case
  alias Graft.{TrainingCoordinator, Worker}

  @fake Path.expand("fake_worker.py", __DIR__)

  setup do
    folder =
      Path.join(System.tmp_dir!(), "graft-#{System.unique_integer([:positive])}-#{System.pid()}")

    File.mkdir_p!(folder)
    on_exit(fn -> File.rm_rf!(folder) end)
    {:ok, folder: folder}
  end

  defp graft(behaviour), do: [System.get_env("PYTHON", "python3"), @fake, behaviour]

  defp coordinator(folder, behaviour, more \\ []) do
    options = [project: folder, graft: graft(behaviour), name: nil, max_restarts: 3] ++ more
    {:ok, pid} = GenServer.start_link(TrainingCoordinator, options)
    pid
  end

  defp wait_for(pid, states, left \\ 6000) do
    run = TrainingCoordinator.status(pid)

    cond do
      run.state in states -> run
      left == 0 -> flunk("still #{inspect(run)}")
      true -> Process.sleep(25) && wait_for(pid, states, left - 1)
    end
  end

  for framing <- [:packet4, :lines] do
    test "a run is followed to its end with #{framing}", %{folder: folder} do
      pid = coordinator(folder, "normal", framing: unquote(framing))
      assert TrainingCoordinator.run(pid) == :ok
      run = wait_for(pid, [:done])
      assert run.result == %{"steps" => 8, "adapter_hash" => "abc"}
      assert {run.checkpoint, run.done, run.total, run.restarts} == {8, 1.5, 20.0, 0}
      assert TrainingCoordinator.run(pid) == :ok
    end
  end

  test "a killed worker is started again", %{folder: folder} do
    pid = coordinator(folder, "crash_once")
    TrainingCoordinator.run(pid)
    run = wait_for(pid, [:done])
    assert run.restarts == 1
    assert length(File.ls!(folder)) == 2
  end

  test "a worker that always crashes is given up", %{folder: folder} do
    pid = coordinator(folder, "crash")
    TrainingCoordinator.run(pid)
    assert wait_for(pid, [:gave_up])
    assert length(File.ls!(folder)) == 4
  end

  test "a mistake is not tried again", %{folder: folder} do
    pid = coordinator(folder, "mistake")
    TrainingCoordinator.run(pid)
    assert wait_for(pid, [:failed]).error["what"] == "the data is wrong"
    assert length(File.ls!(folder)) == 1
  end

  test "another version of the protocol is refused", %{folder: folder} do
    Process.flag(:trap_exit, true)
    {:ok, worker} = Worker.start_link(project: folder, graft: graft("version"))
    assert_receive {:EXIT, ^worker, {:shutdown, {:failed, %{"what" => what}}}}, 150_000
    assert what =~ "version 2"
  end

  test "a run that cannot begin has failed, and says why", %{folder: folder} do
    pid = coordinator(folder, "version")
    TrainingCoordinator.run(pid)
    assert wait_for(pid, [:failed]).error["what"] =~ "version 2"

    options = [project: folder, graft: ["no-such-program"], name: nil]
    {:ok, pid} = GenServer.start_link(TrainingCoordinator, options)
    assert TrainingCoordinator.run(pid) == :ok
    assert wait_for(pid, [:failed]).error["what"] =~ "not installed"
    assert TrainingCoordinator.run(pid) == :ok
  end

  test "a run that ended before its messages were taken has ended", %{folder: folder} do
    for {behaviour, state, files} <- [{"hasty_mistake", :failed, 1}, {"hasty_done", :done, 1}] do
      project = Path.join(folder, behaviour)
      File.mkdir_p!(project)
      pid = coordinator(project, behaviour)
      TrainingCoordinator.run(pid)
      # Nothing is read, so nothing is confirmed, until the worker has ended by itself.
      :sys.suspend(pid)
      wait_until(fn -> elem(Process.info(pid, :messages), 1) |> Enum.any?(&ended?/1) end)
      :sys.resume(pid)
      wait_for(pid, [state])
      assert length(File.ls!(project)) == files
    end
  end

  defp ended?(message), do: is_tuple(message) and elem(message, 0) == :graft_ended

  test "a silent worker is killed and started again", %{folder: folder} do
    pid = coordinator(folder, "silent", silence_ms: 400)
    TrainingCoordinator.run(pid)
    assert wait_for(pid, [:gave_up])
  end

  test "cancel stops the run in order", %{folder: folder} do
    pid = coordinator(folder, "wait")
    TrainingCoordinator.run(pid)
    wait_until(fn -> TrainingCoordinator.status(pid).messages > 2 end)
    TrainingCoordinator.cancel(pid)
    assert wait_for(pid, [:stopped])
    assert File.exists?(Path.join(folder, "stopped"))
  end

  test "closing the port stops the run in order", %{folder: folder} do
    {:ok, worker} = Worker.start_link(project: folder, graft: graft("wait"))
    assert_receive {:graft, ^worker, %{"type" => "heartbeat"}}, 150_000
    GenServer.stop(worker)
    wait_until(fn -> File.exists?(Path.join(folder, "stopped")) end)
  end

  test "JSON comes back as it was" do
    for value <- [
          nil,
          true,
          0,
          -3,
          1.5,
          "Füße \"☂\" \\ \n",
          [1, [], %{}],
          %{"a" => [%{"b" => nil}]}
        ] do
      assert Graft.JSON.decode(Graft.JSON.encode(value)) == {:ok, value}
    end

    assert Graft.JSON.decode(~S({"a": 1e3, "b": "\u00fc\ud83d\ude00"})) ==
             {:ok, %{"a" => 1.0e3, "b" => "ü😀"}}

    for bad <- ["", "{", "[1,", "\"", "{\"a\" 1}", "1 2"],
        do: assert(Graft.JSON.decode(bad) == :error)
  end

  defp wait_until(check, left \\ 6000) do
    cond do
      check.() -> :ok
      left == 0 -> flunk("it never happened")
      true -> Process.sleep(25) && wait_until(check, left - 1)
    end
  end
end
