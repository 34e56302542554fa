"""The source edits with which Horovod 0.28.1 is built, as data.

Every `Edit` replaces a text that must occur exactly once in the named file of the source release; anything else is an
error, so a changed source never gets half a mend. ``PORT`` is needed by any build against torch >= 2.1. ``MENDS`` make
a worker survive what happens around it; what they cure was observed by killing processes at random moments:

* *init-errors*: initialisation runs on a thread of Horovod's own, and an exception there ended the process (SIGABRT).
  It becomes a ``ValueError`` of ``hvd.init()`` that carries the reason; the process is left as it was before the call.
* *close-meshes*: `GlooContext::Finalize` left the sockets of the mesh that carries the data open until the next init,
  so that peers waited for their time-out instead of seeing the end of the connection.
* *broken-mesh*: after a collective that lost a peer, Horovod went on negotiating over the same connections, with
  messages that other ranks took for data of the collective they were still in. The loop now ends, which closes the
  mesh, and by that every other rank learns of it at once: a failure spreads in milliseconds instead of 30 seconds.
* *closed-queue*: a collective that was asked for while the loop ended could slip into the queue after it had been
  emptied, and its caller waited for ever. A queue that was emptied now refuses, until the next init.
* *pair-errors*: an exception in Gloo's event loop ended the process; it becomes an error of that connection. A receive
  or a send that was under way is told of the error too, it used to wait for the time-out.
* *loop-wake*: taking a descriptor out of the loop waited for the next tick of 10 ms; the loop is woken instead.
* *connect-timeout*: a rank that waits for a peer to connect waited five times the Gloo time-out.
* *interrupt*: ``horovod_interrupt()`` ends every wait of Gloo in this process, inside or outside initialisation, and
  touches no other socket. The next ``hvd.init()`` lifts it.
* *interface*: the meshes of process sets, of which every job has one, ignored ``HOROVOD_GLOO_IFACE`` and listened where
  this machine's name leads: often to the loopback, and then workers of different machines never met.
* *wait*: whoever waited for a collective asked for it again and again, each time with Python's lock in hand: a whole
  core of each worker, for as long as the slowest one took, and in the way of its other threads. It sleeps now.
* *marker*: ``horovod_elastic_spark_mends()`` gives `MENDS_VERSION`; ``horovod_last_init_error()`` the last reason.

The edits quote small parts of Horovod (Apache-2.0) and Gloo (BSD-3-Clause).
"""

from __future__ import annotations

from dataclasses import dataclass

MENDS_VERSION = 4

_OPERATIONS = "horovod/common/operations.cc"
_GLOO_CONTEXT = "horovod/common/gloo/gloo_context.cc"
_HTTP_STORE = "horovod/common/gloo/http_store.cc"
_PROCESS_SET = "horovod/common/process_set.cc"
_TENSOR_QUEUE = "horovod/common/tensor_queue"
_HANDLES = "horovod/torch/handle_manager"
_TCP = "third_party/gloo/gloo/transport/tcp/"


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, which occurs exactly once in ``path`` (relative to the source root), by ``new``."""

    mend: str
    path: str
    old: str
    new: str


PORT: tuple[Edit, ...] = (
    Edit("c++17", "CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Edit("c++17", "horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Edit("c++17", "third_party/gloo/CMakeLists.txt", "-std=c++11 -fPIC", "-std=c++17 -fPIC"),
)

MENDS: tuple[Edit, ...] = (
    # ---- init-errors, interrupt, marker: horovod/common/operations.cc
    Edit(
        "init-errors",
        _OPERATIONS,
        """#if HAVE_GLOO
#include "gloo/gloo_controller.h"
""",
        """#if HAVE_GLOO
#include "gloo/common/error.h"
#include "gloo/gloo_controller.h"
""",
    ),
    Edit(
        "interrupt",
        _OPERATIONS,
        """namespace horovod {
namespace common {

namespace {

// All the Horovod state that must be stored globally per-process.
""",
        """#if HAVE_GLOO
namespace gloo {
namespace transport {
namespace tcp {
void interruptPairs();
void allowPairs();
} // namespace tcp
} // namespace transport
} // namespace gloo
#endif

namespace horovod {
namespace common {

namespace {

// Why the last initialization failed; empty if it did not. A fixed buffer, so
// that a pointer to it can be handed to Python.
char last_init_error[2048] = "";

void RecordInitError(const std::string& what) {
  std::strncpy(last_init_error, what.c_str(), sizeof(last_init_error) - 1);
}

// All the Horovod state that must be stored globally per-process.
""",
    ),
    Edit(
        "init-errors",
        _OPERATIONS,
        """bool RunLoopOnce(HorovodGlobalState& state);

void BackgroundThreadLoop(HorovodGlobalState& state) {
""",
        """bool RunLoopOnce(HorovodGlobalState& state);

// Takes down a half-built initialization. InitializeHorovodOnce, which waits
// for initialization_failed, joins the thread and makes init possible again.
void FailInitialization(HorovodGlobalState& state, const std::string& what) {
  RecordInitError(what);
  LOG(WARNING) << "Horovod could not be initialized: " << what;
  state.shut_down = true;
#if HAVE_GLOO
  if (state.control_operation == LibType::GLOO) {
    state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);
  }
  global_gloo_context.Finalize();
#endif
  state.initialization_failed = true;
}

void BackgroundThreadLoop(HorovodGlobalState& state) {
""",
    ),
    Edit(
        "init-errors",
        _OPERATIONS,
        """  {
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
#endif // HAVE_GLOO
""",
        """  {
    try {
      global_gloo_context.Initialize(ParseGlooIface());
    } catch (const std::exception& ex) {
      FailInitialization(state, ex.what());
      return;
    }
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    try {
      state.process_set_table.Initialize(global_gloo_context);
    } catch (const std::exception& ex) {
      FailInitialization(state, ex.what());
      return;
    }
  }
#endif // HAVE_GLOO
""",
    ),
    Edit(
        "init-errors",
        _OPERATIONS,
        """        << "Horovod could not be initialized: " << ex.what();
    state.initialization_failed = true;
""",
        """        << "Horovod could not be initialized: " << ex.what();
    RecordInitError(ex.what());
    state.initialization_failed = true;
""",
    ),
    Edit(
        "init-errors",
        _OPERATIONS,
        """    // Reset initialization flag
    horovod_global.initialization_done = false;
""",
        """    // Reset initialization flags
    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
    RecordInitError("");
#if HAVE_GLOO
    gloo::transport::tcp::allowPairs();
#endif
""",
    ),
    Edit(
        "init-errors",
        _OPERATIONS,
        """  if (horovod_global.initialization_failed) {
    return false;
  }
  LOG(DEBUG) << "Background thread init done";
""",
        """  if (horovod_global.initialization_failed) {
    // Leave everything as horovod_shutdown() leaves it: init can be called again.
    if (horovod_global.background_thread.joinable()) {
      horovod_global.background_thread.join();
      horovod_global.initialize_flag.clear();
      horovod_global.shut_down = false;
      horovod_global.initialization_done = false;
    }
    return false;
  }
  LOG(DEBUG) << "Background thread init done";
""",
    ),
    Edit(
        "marker",
        _OPERATIONS,
        """int horovod_is_initialized() {
""",
        """int horovod_elastic_spark_mends() { return @MENDS_VERSION@; }

const char* horovod_last_init_error() { return last_init_error; }

void horovod_interrupt() {
#if HAVE_GLOO
  gloo::transport::tcp::interruptPairs();
#endif
}

int horovod_is_initialized() {
""",
    ),
    Edit(
        "marker",
        "horovod/common/basics.py",
        """            raise ValueError(
                "Horovod initialization failed. Please check log messages above for a more descriptive error.")
""",
        """            reason = self.MPI_LIB_CTYPES.horovod_last_init_error
            reason.restype = ctypes.c_char_p
            raise ValueError("Horovod initialization failed: " + reason().decode(errors="replace"))
""",
    ),
    # ---- broken-mesh
    Edit(
        "broken-mesh",
        _OPERATIONS,
        """  Status status;
  try {
    // process_set is passed here only for the case of Response::JOIN where
""",
        """  Status status;
  bool mesh_broken = false;
  try {
    // process_set is passed here only for the case of Response::JOIN where
""",
    ),
    Edit(
        "broken-mesh",
        _OPERATIONS,
        """    status = op_manager->ExecuteOperation(entries, response, process_set);
  } catch (const std::exception& ex) {
""",
        """    status = op_manager->ExecuteOperation(entries, response, process_set);
#if HAVE_GLOO
  } catch (const gloo::IoException& ex) {
    mesh_broken = true;
    status = Status::UnknownError(ex.what());
#endif
  } catch (const std::exception& ex) {
""",
    ),
    Edit(
        "broken-mesh",
        _OPERATIONS,
        """      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
}
""",
        """      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
  if (mesh_broken) {
    // Ends the background loop, which closes the connections to all peers.
    throw std::runtime_error(status.reason());
  }
}
""",
    ),
    # ---- close-meshes
    Edit(
        "close-meshes",
        _GLOO_CONTEXT,
        """void GlooContext::Finalize() {
  if (!enabled_) {
    return;
  }

  global_ctx.reset();
  ctx.reset();
  cross_ctx.reset();
  local_ctx.reset();
  reset_ = true;
}
""",
        """void GlooContext::Finalize() {
  // The context of a process set is never enabled, and holds connections.
  global_ctx.reset();
  ctx.reset();
  cross_ctx.reset();
  local_ctx.reset();
  reset_ = enabled_;
}
""",
    ),
    Edit(
        "init-errors",
        _GLOO_CONTEXT,
        """    std::vector<char> result = init_store.get(key);
""",
        """    std::vector<char> result = init_store.get(key);
    if (result.empty()) {
      throw std::runtime_error("the rendezvous server knows no rank for " + key);
    }
""",
    ),
    Edit(
        "close-meshes",
        _PROCESS_SET,
        """    MarkProcessSetForRemoval(id);
    // Block until all processes have been able to finalize and deregister
    // this process set.
    while (true) {
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
""",
        """    try {
      MarkProcessSetForRemoval(id);
      // Block until all processes have been able to finalize and deregister
      // this process set.
      while (true) {
        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
        if (ProcessSetHasJustBeenRemoved()) {
          break;
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
    } catch (const std::exception& ex) {
      // A peer is gone: there is nobody to agree with about the removal.
      id_to_be_removed_ = NO_PENDING_REMOVAL;
      id_to_process_set_[id].Finalize(status);
      DeregisterProcessSet(id);
    }
""",
    ),
    # ---- closed-queue
    Edit(
        "closed-queue",
        _TENSOR_QUEUE + ".h",
        """  void FinalizeTensorQueue(const Status& status);
""",
        """  void FinalizeTensorQueue(const Status& status);

  // Accepts tensors again after FinalizeTensorQueue.
  void Reopen();
""",
    ),
    Edit(
        "closed-queue",
        _TENSOR_QUEUE + ".h",
        """  mutable std::mutex mutex_;
};
""",
        """  mutable std::mutex mutex_;

  // Nobody would ever take out what is added now.
  bool closed_ = false;
};
""",
    ),
    Edit(
        "closed-queue",
        _TENSOR_QUEUE + ".cc",
        """  std::lock_guard<std::mutex> guard(mutex_);
  if (tensor_table_.find(e.tensor_name) != tensor_table_.end()) {
    return DUPLICATE_NAME_ERROR;
""",
        """  std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) {
    return SHUT_DOWN_ERROR;
  }
  if (tensor_table_.find(e.tensor_name) != tensor_table_.end()) {
    return DUPLICATE_NAME_ERROR;
""",
    ),
    Edit(
        "closed-queue",
        _TENSOR_QUEUE + ".cc",
        """  std::lock_guard<std::mutex> guard(mutex_);

  for (std::size_t i = 0; i < entries.size(); ++i) {
""",
        """  std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) {
    return SHUT_DOWN_ERROR;
  }

  for (std::size_t i = 0; i < entries.size(); ++i) {
""",
    ),
    Edit(
        "closed-queue",
        _TENSOR_QUEUE + ".cc",
        """void TensorQueue::FinalizeTensorQueue(const Status& status) {
  std::lock_guard<std::mutex> guard(mutex_);
""",
        """void TensorQueue::Reopen() {
  std::lock_guard<std::mutex> guard(mutex_);
  closed_ = false;
}

void TensorQueue::FinalizeTensorQueue(const Status& status) {
  std::lock_guard<std::mutex> guard(mutex_);
  closed_ = true;
""",
    ),
    Edit(
        "closed-queue",
        _PROCESS_SET,
        """  if (gloo_context.ctx != nullptr) {
    controller->Initialize();
  }
""",
        """  if (gloo_context.ctx != nullptr) {
    controller->Initialize();
  }
  tensor_queue.Reopen();
""",
    ),
    # ---- interface
    Edit(
        "interface",
        _GLOO_CONTEXT,
        """  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
        """  gloo_iface_ = global_context.gloo_iface_;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
    ),
    # ---- interrupt: polling of the rendezvous server
    Edit(
        "interrupt",
        _HTTP_STORE,
        """#include "../logging.h"

namespace horovod {
""",
        """#include "../logging.h"

namespace gloo {
namespace transport {
namespace tcp {
bool pairsInterrupted();
} // namespace tcp
} // namespace transport
} // namespace gloo

namespace horovod {
""",
    ),
    Edit(
        "interrupt",
        _HTTP_STORE,
        """  while (!CheckKeys(keys)) {
""",
        """  while (!CheckKeys(keys)) {
    if (gloo::transport::tcp::pairsInterrupted()) {
      GLOO_THROW_IO_EXCEPTION("Interrupted while waiting for ", ::gloo::MakeString(keys));
    }
""",
    ),
    Edit(
        "interrupt",
        _HTTP_STORE,
        """      LOG(DEBUG) << "Exception: " << e.what();
    }
""",
        """      LOG(DEBUG) << "Exception: " << e.what();
    }
    if (gloo::transport::tcp::pairsInterrupted()) {
      break;
    }
""",
    ),
    # ---- Gloo: pairs
    Edit(
        "connect-timeout",
        _TCP + "pair.h",
        """        timeout_ * 5,
""",
        """        timeout_,
""",
    ),
    Edit(
        "interrupt",
        _TCP + "pair.h",
        """class Pair : public ::gloo::transport::Pair, public Handler {
 protected:
""",
        """// Ends every wait of this process's pairs with an exception, now and until
// allowPairs is called. May be called from any thread.
void interruptPairs();
void allowPairs();
bool pairsInterrupted();

class Pair : public ::gloo::transport::Pair, public Handler {
  friend void interruptPairs();

 protected:
""",
    ),
    Edit(
        "interrupt",
        _TCP + "pair.cc",
        """constexpr size_t kMaxRecvBufferSize = 32 * 1024 * 1024;

} // namespace
""",
        """constexpr size_t kMaxRecvBufferSize = 32 * 1024 * 1024;

// The pairs that live in this process. Order of locks: this one first, then
// the lock of a pair; the event loop takes neither while it waits.
struct LivePairs {
  std::mutex m;
  std::set<Pair*> pairs;
  std::atomic<bool> interrupted{false};
};

LivePairs& livePairs() {
  static LivePairs* live = new LivePairs(); // outlives static destructors
  return *live;
}

} // namespace

void interruptPairs() {
  auto& live = livePairs();
  live.interrupted = true;
  std::lock_guard<std::mutex> guard(live.m);
  for (auto pair : live.pairs) {
    pair->signalExceptionExternal("Interrupted on request");
  }
}

void allowPairs() {
  livePairs().interrupted = false;
}

bool pairsInterrupted() {
  return livePairs().interrupted;
}
""",
    ),
    Edit(
        "interrupt",
        _TCP + "pair.cc",
        """#include <algorithm>
#include <sstream>
""",
        """#include <algorithm>
#include <set>
#include <sstream>
""",
    ),
    Edit(
        "interrupt",
        _TCP + "pair.cc",
        """      ex_(nullptr) {
  listen();
}
""",
        """      ex_(nullptr) {
  listen();
  std::lock_guard<std::mutex> guard(livePairs().m);
  livePairs().pairs.insert(this);
}
""",
    ),
    Edit(
        "interrupt",
        _TCP + "pair.cc",
        """Pair::~Pair() {
  // Needs lock""",
        """Pair::~Pair() {
  {
    std::lock_guard<std::mutex> guard(livePairs().m);
    livePairs().pairs.erase(this);
  }
  // Needs lock""",
    ),
    Edit(
        "interrupt",
        _TCP + "pair.cc",
        """  socklen_t addrlen;
  throwIfException();

  peer_ = peer;
""",
        """  socklen_t addrlen;
  throwIfException();
  if (pairsInterrupted()) {
    signalAndThrowException("Interrupted on request");
  }

  peer_ = peer;
""",
    ),
    # ---- Gloo: pair-errors
    Edit(
        "pair-errors",
        _TCP + "pair.cc",
        """  // State must be <= CONNECTED.
  // If state is CLOSED; this function will NOT be called. Refer to
  // Pair::changeState and Device::unregisterDescriptor for more info.
  GLOO_ENFORCE_LE(state_, CONNECTED);

  // Exception must not be set.
  // If exception is set, state must advance to CLOSED state.
  GLOO_ENFORCE(ex_ == nullptr);

  if (state_ == CONNECTED) {
    handleReadWrite(events);
    return;
  }

  if (state_ == LISTENING) {
    handleListening();
    return;
  }

  if (state_ == CONNECTING) {
    handleConnecting();
    return;
  }

  GLOO_ENFORCE(false, "Unexpected state: ", state_);
}
""",
        """  // An event of a pair that has been closed meanwhile.
  if (state_ == CLOSED) {
    return;
  }

  // An exception must not leave the thread of the event loop: it would end the
  // process. It becomes the error of this pair and closes it.
  try {
    if (state_ == CONNECTED) {
      handleReadWrite(events);
    } else if (state_ == LISTENING) {
      handleListening();
    } else if (state_ == CONNECTING) {
      handleConnecting();
    } else {
      GLOO_ENFORCE(false, "Unexpected state: ", state_);
    }
  } catch (const std::exception& e) {
    if (ex_ == nullptr) {
      signalException(GLOO_ERROR_MSG("Event of pair ", peer_.str(), ": ", e.what()));
    }
  }
}
""",
    ),
    Edit(
        "pair-errors",
        _TCP + "pair.cc",
        """    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
  }
""",
        """    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
    NonOwningPtr<UnboundBuffer> buf(op.ubuf);
    if (buf) {
      buf->signalException(ex);
    }
  }

  // The receive operation that is under way is in no queue any more.
  {
    NonOwningPtr<UnboundBuffer> buf(rx_.ubuf);
    if (buf) {
      buf->signalException(ex);
    }
  }
""",
    ),
    # ---- wait: horovod/torch/handle_manager, mpi_ops_v2.cc
    Edit(
        "wait",
        _HANDLES + ".h",
        """#include <atomic>
""",
        """#include <atomic>
#include <condition_variable>
""",
    ),
    Edit(
        "wait",
        _HANDLES + ".h",
        """  bool PollHandle(int handle);
""",
        """  bool PollHandle(int handle);
  // Returns once PollHandle would say true; throws where that would throw.
  void WaitForHandle(int handle);
""",
    ),
    Edit(
        "wait",
        _HANDLES + ".h",
        """  std::mutex mutex_;
""",
        """  std::mutex mutex_;
  std::condition_variable changed_;
""",
    ),
    Edit(
        "wait",
        _HANDLES + ".cc",
        """  results_[handle] = std::make_shared<Status>(status);
}
""",
        """  results_[handle] = std::make_shared<Status>(status);
  changed_.notify_all();
}

void HandleManager::WaitForHandle(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
  lock.unlock();
  PollHandle(handle);
}
""",
    ),
    Edit(
        "wait",
        _HANDLES + ".cc",
        """  results_.clear();
""",
        """  results_.clear();
  changed_.notify_all();
""",
    ),
    Edit(
        "wait",
        "horovod/torch/mpi_ops_v2.cc",
        """  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
  auto status = handle_manager.ReleaseHandle(handle);
""",
        """  // Most are done when they are asked for: Python's lock is given away only to wait.
  if (!handle_manager.PollHandle(handle)) {
    py::gil_scoped_release release_python_gil;
    handle_manager.WaitForHandle(handle);
  }
  auto status = handle_manager.ReleaseHandle(handle);
""",
    ),
    # ---- Gloo: loop-wake
    Edit(
        "loop-wake",
        _TCP + "loop.h",
        """  std::mutex m_;
  std::condition_variable cv_;
};
""",
        """  std::mutex m_;
  std::condition_variable cv_;
  uint64_t tick_{0};
};
""",
    ),
    Edit(
        "loop-wake",
        _TCP + "loop.cc",
        """    std::unique_lock<std::mutex> lock(m_);
    cv_.wait(lock);
""",
        """    std::unique_lock<std::mutex> lock(m_);
    const auto now = tick_;
    // Makes epoll_wait return at once.
    deferrables_.defer([] {});
    cv_.wait(lock, [&] { return tick_ != now; });
""",
    ),
    Edit(
        "loop-wake",
        _TCP + "loop.cc",
        """    // Wakeup everyone waiting for a loop tick to finish.
    cv_.notify_all();
""",
        """    // Wakeup everyone waiting for a loop tick to finish.
    {
      std::lock_guard<std::mutex> lock(m_);
      tick_++;
    }
    cv_.notify_all();
""",
    ),
    Edit(
        "loop-wake",
        _TCP + "loop.cc",
        """    done_ = true;
    loop_->join();
""",
        """    done_ = true;
    deferrables_.defer([] {});
    loop_->join();
""",
    ),
)
