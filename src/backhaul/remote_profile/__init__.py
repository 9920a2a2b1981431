"""Torch's own profilers over remote calls: a caller's profile includes what its calls do on their callees.

`torch.profiler.profile`, `torch.autograd.profiler.profile` and its legacy sibling record one thread. When a
profiled thread makes a call, the call goes through `caller` instead of directly to the agent::

    caller                                              callee
    record_function "rpc_sync#f(a -> b) [call 7]"
    run_profiled(options, f, args, kwargs) ─ ─ ─ ─ ─►   a `Listener` records f with the legacy profiler,
                                                        which is per thread, beside any other
    span 7 keeps the report  ◄─ ─ ─ ─  (value, report)  its events become rows of plain data
    …
    the profile is read: `profilers` makes `rows.graft` put the rows of each span into the events

- The label of the recorded block names its span. So torch itself keeps track of the profile, the thread
  and the time of a call. The number is removed from the label when the profile is read.
- The spans hang on the profile object, so they live as long as it does. A report that arrives after the profile was
  read is dropped with its span.
- Calls that the callee makes while it is recorded work the same way: their spans hang on the listener, and their rows
  are grafted into its events before those are sent. So names nest:
  ``rpc_sync#f(a -> b)#remote_op: rpc_sync#g(b -> c)#…``.
- `remote` does not wait for its value, so the report stays on the owner, and a second call, of `callee.collect`,
  fetches it.

A call without a profiler costs one question to torch, `profilers.is_on`, and is otherwise unaffected. In a
federation peers run only exposed functions, so there only the caller's own event is recorded.
"""
