use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A device for training, by the name a user gives it: `auto`, `cpu`, `cuda` or `cuda:1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The best device of this machine. A run that has started knows which one.
    #[default]
    Auto,
    /// The host's CPU.
    Cpu,
    /// An NVIDIA GPU by its number; `cuda` is the first.
    Cuda(u32),
}

/// A word that is not the name of a device.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not a device; write auto, cpu, cuda or cuda:N")]
pub struct ParseDeviceError(String);

impl FromStr for DeviceName {
    type Err = ParseDeviceError;

    fn from_str(word: &str) -> Result<DeviceName, ParseDeviceError> {
        match word {
            "auto" => Ok(DeviceName::Auto),
            "cpu" => Ok(DeviceName::Cpu),
            "cuda" => Ok(DeviceName::Cuda(0)),
            _ => {
                let number = word.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                number.map(DeviceName::Cuda).ok_or_else(|| ParseDeviceError(word.to_string()))
            }
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Auto => f.pad("auto"),
            DeviceName::Cpu => f.pad("cpu"),
            DeviceName::Cuda(number) => f.pad(&format!("cuda:{number}")),
        }
    }
}

impl Serialize for DeviceName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<DeviceName, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_shown() {
        for device in [DeviceName::Auto, DeviceName::Cpu, DeviceName::Cuda(0), DeviceName::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
    }

    #[test]
    fn what_is_no_device_is_refused() {
        for word in ["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cuda1"] {
            assert!(word.parse::<DeviceName>().is_err(), "{word}");
        }
    }
}
