"""Torch's own profilers over remote calls: what a call does on its callee is in the profile of its caller.

`torch.profiler.profile`, `torch.autograd.profiler.profile` and its legacy sibling record one thread. When a thread that
is being profiled makes a call, the call takes the way through `caller` instead of going to the agent at once::

    caller                                              callee
    record_function "rpc_sync#f(a -> b) [call 7]"
    run_profiled(options, f, args, kwargs) ─ ─ ─ ─ ─►   a `Listener` records f with the legacy profiler,
                                                        which is a thread's own, beside any other
    span 7 keeps the report  ◄─ ─ ─ ─  (value, report)  its events become rows of plain data
    …
    the profile is read: `profilers` sees to it that `rows.graft` puts the rows of each span into the events

- The label of the recorded block says which span it belongs to. So torch itself keeps apart which profile, which thread
  and which moment a call belongs to; the number is taken off the label again when the profile is read.
- The spans hang on the profile object, so they live as long as it does. A report that comes after the profile was read
  is dropped with its span.
- Calls made by the callee while it is recorded take the same way: their spans hang on the listener, and their rows are
  grafted into its events before those are sent. So names nest: ``rpc_sync#f(a -> b)#remote_op: rpc_sync#g(b -> c)#…``.
- `remote` does not wait for its value, so the report stays on the owner, and a second call, of `callee.collect`,
  fetches it.

A call that no profiler watches asks one question of torch, `profilers.is_on`, and is otherwise as it was. In a
federation peers run only what is exposed to them; there only the caller's own event is recorded.
"""
