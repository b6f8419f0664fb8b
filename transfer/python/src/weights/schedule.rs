//! Parameters, slots and schedules, as Python sees them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use putget_transfer::Error;
use putget_transfer_weights::{
    Area, Cell, Dtype, Item, Layout, Memory, Param, PlanOptions, Recipe, Schedule, Slot, Target,
};

use crate::arguments;
use crate::errors::PyResult;

/// A field of a parameter or slot: what does not fit is named.
fn field<'py, T: FromPyObject<'py>>(owner: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    let value = owner.getattr(name)?;
    Ok(value.extract().map_err(|_| {
        let of = owner.getattr("name").map_or_else(|_| "?".into(), |name| name.to_string());
        PyValueError::new_err(format!("{of:?}: {name} {value} came; a value of another type or range is needed"))
    })?)
}

fn area(start: Vec<u64>, size: Vec<u64>) -> Area {
    Area { start: start.into(), size: size.into() }
}

/// Layouts that were read, by the objects that they were read from: parameters share them.
type Layouts = HashMap<usize, Arc<Layout>>;

fn layout(of: &Bound<'_, PyAny>) -> PyResult<Layout> {
    let mut cells = Vec::new();
    for shard in field::<Vec<Bound<'_, PyAny>>>(of, "shards")? {
        let mut holders: Vec<u32> = field(&shard, "ranks")?;
        holders.sort_unstable();
        cells.push(Cell { area: area(field(&shard, "start")?, field(&shard, "size")?), holders: holders.into() });
    }
    Ok(Layout { cells, group: field(of, "group")?, gathers: field(of, "gathers")? })
}

fn param(of: &Bound<'_, PyAny>, layouts: &mut Layouts) -> PyResult<Param> {
    let shared = of.getattr("layout")?;
    let key = shared.as_ptr() as usize;
    let found = match layouts.get(&key) {
        Some(found) => Arc::clone(found),
        None => {
            let found = Arc::new(layout(&shared)?);
            layouts.insert(key, Arc::clone(&found));
            found
        }
    };
    let dtype = Dtype::from_name(&field::<String>(of, "dtype")?)?;
    Ok(Param { name: field(of, "name")?, shape: field(of, "shape")?, dtype, layout: found })
}

fn slot(of: &Bound<'_, PyAny>) -> PyResult<Slot> {
    Ok(Slot {
        name: field(of, "name")?,
        area: area(field(of, "start")?, field(of, "size")?),
        memory: field(of, "memory")?,
        offset: field(of, "offset")?,
        strides: field(of, "strides")?,
        dtype: Dtype::from_name(&field::<String>(of, "dtype")?)?,
        recipe: Recipe::from_name(&field::<String>(of, "recipe")?)?,
    })
}

type Rank<'py> = (Vec<(String, u64)>, Vec<Bound<'py, PyAny>>);

/// Plans a schedule.
#[pyfunction]
#[pyo3(signature = (params, slots, replicas, task_bytes, unused))]
pub(super) fn make(
    py: Python<'_>,
    params: Vec<Bound<'_, PyAny>>,
    slots: Vec<Rank<'_>>,
    #[pyo3(from_py_with = arguments::replicas)] replicas: u32,
    #[pyo3(from_py_with = arguments::task_bytes)] task_bytes: u64,
    unused: HashSet<String>,
) -> PyResult<PySchedule> {
    let mut layouts = Layouts::new();
    let params = params.iter().map(|one| param(one, &mut layouts)).collect::<PyResult<Vec<_>>>()?;
    let target = |(memory, slots): &Rank<'_>| {
        let memory = memory.iter().map(|(name, bytes)| Memory { name: name.clone(), bytes: *bytes }).collect();
        Ok(Target { memory, slots: slots.iter().map(slot).collect::<PyResult<Vec<_>>>()? })
    };
    let replica = slots.iter().map(target).collect::<PyResult<Vec<_>>>()?;
    let options = PlanOptions { replicas, task_bytes, unused };
    let schedule = py.allow_threads(|| putget_transfer_weights::plan(params, replica, &options))?;
    Ok(PySchedule { schedule: Arc::new(schedule) })
}

/// Which bytes each trainer writes to which rank, in which order.
#[pyclass(name = "Schedule", module = "putget_transfer.weights", frozen)]
pub(crate) struct PySchedule {
    pub schedule: Arc<Schedule>,
}

/// Parameter, recipe, type, start, size, whether it is gathered, offset and bytes of an area.
type Row = (u32, &'static str, &'static str, Vec<u64>, Vec<u64>, bool, u64, u64);

/// Parameter, start, size, memory, offset, strides, type and recipe of a slot.
type SlotRow = (String, Vec<u64>, Vec<u64>, u32, u64, Vec<u64>, &'static str, &'static str);

/// A trainer rank's work in one step: slots to prepare and to write.
#[pyclass(name = "Task", module = "putget_transfer.weights", frozen, get_all)]
pub(crate) struct PyTask {
    group: u32,
    num_bytes: u64,
    items: Vec<Row>,
}

fn row(item: &Item) -> Row {
    let (start, size) = (item.area.start.to_vec(), item.area.size.to_vec());
    (item.param, item.recipe.name(), item.dtype.name(), start, size, item.gathered, item.offset, item.num_bytes())
}

impl PySchedule {
    fn target<T>(&self, rank: usize, found: Option<T>) -> PyResult<T> {
        let problem = || format!("{rank} came; the schedule has {} rollout ranks", self.schedule.num_targets());
        Ok(found.ok_or_else(|| Error::argument("rank", problem()))?)
    }

    fn trainer(&self, rank: usize) -> PyResult<usize> {
        let ranks = self.schedule.num_ranks();
        let problem = || Error::argument("rank", format!("{rank} came; the schedule has {ranks} trainer ranks"));
        Ok(Some(rank).filter(|rank| *rank < ranks).ok_or_else(problem)?)
    }
}

#[pymethods]
impl PySchedule {
    #[getter]
    fn digest(&self) -> String {
        self.schedule.digest()
    }

    #[getter]
    fn num_ranks(&self) -> usize {
        self.schedule.num_ranks()
    }

    #[getter]
    fn num_targets(&self) -> usize {
        self.schedule.num_targets()
    }

    #[getter]
    fn replica_size(&self) -> usize {
        self.schedule.replica_size()
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.schedule.num_bytes()
    }

    #[getter]
    fn gathered_bytes(&self) -> u64 {
        self.schedule.gathered()
    }

    #[getter]
    fn groups(&self) -> Vec<String> {
        self.schedule.groups().to_vec()
    }

    #[getter]
    fn params(&self) -> Vec<(String, Vec<u64>, &'static str)> {
        let row = |param: &Param| (param.name.clone(), param.shape.clone(), param.dtype.name());
        self.schedule.params().iter().map(row).collect()
    }

    fn count(&self, #[pyo3(from_py_with = arguments::target)] rank: usize) -> PyResult<u64> {
        self.target(rank, self.schedule.count(rank))
    }

    fn received(&self, #[pyo3(from_py_with = arguments::target)] rank: usize) -> PyResult<u64> {
        self.target(rank, self.schedule.received(rank))
    }

    fn sent(&self, #[pyo3(from_py_with = arguments::target)] rank: usize) -> PyResult<u64> {
        Ok(self.schedule.sent(self.trainer(rank)?))
    }

    fn memory(&self, #[pyo3(from_py_with = arguments::target)] rank: usize) -> PyResult<Vec<(String, u64)>> {
        let target = self.target(rank, self.schedule.target(rank))?;
        Ok(target.memory.iter().map(|memory| (memory.name.clone(), memory.bytes)).collect())
    }

    fn slots(&self, #[pyo3(from_py_with = arguments::target)] rank: usize) -> PyResult<Vec<SlotRow>> {
        let row = |slot: &Slot| {
            let (start, size) = (slot.area.start.to_vec(), slot.area.size.to_vec());
            let (dtype, recipe) = (slot.dtype.name(), slot.recipe.name());
            (slot.name.clone(), start, size, slot.memory, slot.offset, slot.strides.clone(), dtype, recipe)
        };
        Ok(self.target(rank, self.schedule.target(rank))?.slots.iter().map(row).collect())
    }

    /// The trainer ranks that write to a rollout rank.
    fn senders(&self, #[pyo3(from_py_with = arguments::target)] rank: usize) -> PyResult<Vec<usize>> {
        self.target(rank, self.schedule.count(rank))?;
        let sends = |sender: &usize| {
            let mut items = self.schedule.tasks(*sender).iter().flat_map(|task| &task.items);
            items.any(|item| item.dests.iter().any(|dest| dest.target as usize == rank))
        };
        Ok((0..self.schedule.num_ranks()).filter(sends).collect())
    }

    fn tasks(&self, #[pyo3(from_py_with = arguments::target)] rank: usize) -> PyResult<Vec<PyTask>> {
        let task = |task: &putget_transfer_weights::Task| PyTask {
            group: task.group,
            num_bytes: task.num_bytes,
            items: task.items.iter().map(row).collect(),
        };
        Ok(self.schedule.tasks(self.trainer(rank)?).iter().map(task).collect())
    }

    fn show(&self) -> String {
        self.schedule.show()
    }
}
